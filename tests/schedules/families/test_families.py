"""Every family at all small sizes, and the orders of single families."""

from __future__ import annotations

import warnings
from fractions import Fraction

import pytest

from lightning_pipe import schedules
from lightning_pipe.schedules import GPipe, Interleaved, LoopedBFS, OneFOneB
from lightning_pipe.simulate import simulate
from tests.support.schedule_sweep import SWEEPS, Sweep


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_every_family_builds_for_all_small_sizes(sweep: Sweep) -> None:
    for schedule in sweep:
        schedule.validate()
        assert schedule.name == sweep.name
        assert not schedule.forward_only


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
