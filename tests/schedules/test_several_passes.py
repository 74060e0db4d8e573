"""Schedules of several passes over the stages."""

from __future__ import annotations

import pytest

from lightning_pipe import schedules
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.schedules import DualPipeV, GPipe, Interleaved, OneFOneB
from lightning_pipe.schedules.several_passes import several_passes


def test_stages_of_all_passes_are_on_the_ranks_of_the_first() -> None:
    one = Interleaved(2).build(ranks=2, micro_batches=4)
    twice = several_passes(one, 3)
    assert twice.stages == 12
    assert [twice.placement[0, stage] for stage in range(12)] == 6 * [0, 1]
    assert several_passes(one, 1) is one


def test_a_loop_is_ordered_as_interleaved() -> None:
    twice = several_passes(OneFOneB().build(ranks=2, micro_batches=4), 2)
    assert twice.actions == Interleaved(2).build(ranks=2, micro_batches=4).actions


def test_gpipe_runs_all_forward_passes_first() -> None:
    twice = several_passes(GPipe().build(ranks=2, micro_batches=2), 2)
    assert [" ".join(map(str, order)) for order in twice.actions] == [
        "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0",
        "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
    ]


@pytest.mark.parametrize("name", ["zero_bubble", "chimera", "gems", "dualpipe", "pipedream"])
def test_others_are_refused(name: str) -> None:
    schedule = schedules.get(name).build(2, 8)
    with pytest.raises(ConfigurationError, match=f"Schedule {schedule.name!r} cannot train with passes=2"):
        several_passes(schedule, 2)
    with pytest.raises(ConfigurationError, match="cannot train"):
        several_passes(DualPipeV().build(2, 8), 2)
