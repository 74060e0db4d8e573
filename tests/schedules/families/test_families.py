"""Every family at all small sizes, and the orders of single families."""

from __future__ import annotations

import warnings
from fractions import Fraction

import pytest

from lightning_pipe import schedules
from lightning_pipe.schedules import GPipe, Interleaved, Kind, LoopedBFS, Naive, OneFOneB
from lightning_pipe.schedules.dependencies import held
from lightning_pipe.simulate import simulate
from tests.support.schedule_sweep import SWEEPS, Sweep


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_every_family_builds_for_all_small_sizes(sweep: Sweep) -> None:
    for schedule in sweep:
        schedule.validate()
        assert schedule.name == sweep.name
        assert not schedule.forward_only


def test_gpipe_runs_backward_in_reverse() -> None:
    schedule = GPipe().build(ranks=2, micro_batches=3)
    assert [" ".join(map(str, actions)) for actions in schedule.actions] == [
        "0F0 0F1 0F2 0B2 0B1 0B0",
        "1F0 1F1 1F2 1B2 1B1 1B0",
    ]


def test_naive_has_one_micro_batch_in_the_pipeline() -> None:
    schedule = Naive().build(ranks=2, micro_batches=2)
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1B0 1F1 1B1"
    assert held(schedule.actions) == [1, 1]


def test_interleaved_is_megatrons_order() -> None:
    schedule = Interleaved(virtual_stages=2).build(ranks=2, micro_batches=4)
    assert [" ".join(map(str, actions)) for actions in schedule.actions] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 7])
def test_interleaved_off_its_multiples_says_so(micro_batches: int) -> None:
    with pytest.warns(UserWarning, match=f"no order of its own for {micro_batches} micro-batches on 4 ranks"):
        Interleaved().build(ranks=4, micro_batches=micro_batches)


def test_published_orders_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in schedules.names():
            schedules.get(name).build(ranks=4, micro_batches=8)
        Interleaved().build(ranks=1, micro_batches=3)
        Interleaved(virtual_stages=1).build(ranks=4, micro_batches=3)


def test_interleaved_with_one_virtual_stage_is_1f1b() -> None:
    for micro_batches in (1, 3, 4, 6):
        assert (
            Interleaved(virtual_stages=1).build(4, micro_batches).actions == OneFOneB().build(4, micro_batches).actions
        )


def test_looped_bfs_with_one_virtual_stage_is_gpipe() -> None:
    for micro_batches in (1, 3, 4):
        assert LoopedBFS(virtual_stages=1).build(4, micro_batches).actions == GPipe().build(4, micro_batches).actions


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_the_bubble_of_looped_bfs(virtual: int) -> None:
    """Interleaved 1F1B's, with the activations of everything."""
    for ranks, micro_batches in ((2, 2), (3, 4), (4, 4), (4, 9)):
        timeline = simulate(LoopedBFS(virtual).build(ranks, micro_batches))
        assert timeline.bubble_ratio == Fraction(ranks - 1, virtual * micro_batches + ranks - 1)
        assert timeline.peak_activations == (virtual * micro_batches,) * ranks


def test_all_micro_batches_of_a_linear_schedule_take_pipe_0() -> None:
    schedule = OneFOneB().build(ranks=3, micro_batches=5)
    assert schedule.pipes == 1
    assert {action.pipe for actions in schedule.actions for action in actions} == {0}
    assert {action.kind for actions in schedule.actions for action in actions} == {Kind.FORWARD, Kind.BACKWARD}
