"""Recomputation as an action of a schedule."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import Action, GPipe, Kind, OneFOneB, ZeroBubble, lower, with_recompute
from lightning_pipe.schedules.family import schedule_of
from lightning_pipe.simulate import Costs, simulate
from tests.support.rendezvous_sends import assert_mirrored, run
from tests.support.schedule_sweep import SWEEPS, Sweep


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_every_schedule_can_recompute(sweep: Sweep, mode: str) -> None:
    for schedule in list(sweep)[::3]:
        again = with_recompute(schedule, mode)
        again.validate()
        lowered = lower(again)
        assert_mirrored(lowered)
        run(lowered, schedule.stages - 1)
        for order, plain in zip(again.actions, schedule.actions, strict=True):
            recomputed = {action[1:4] for action in order if action.kind is Kind.RECOMPUTE}
            forwards = {action[1:4]: action for action in plain if action.kind is Kind.FORWARD}
            last = {(action.stage, action.pipe): place for place, action in forwards.items()}
            kept = {a[1:4] for a, b in pairwise(plain) if a.kind is Kind.FORWARD and a[1:4] == b[1:4]}
            kept |= set(last.values()) if mode == "except_last" else set()
            doubled = {action[1:4] for action in plain if action.kind is Kind.RECOMPUTE}
            assert recomputed == forwards.keys() - kept | doubled


def test_it_stands_before_the_backward_action() -> None:
    schedule = with_recompute(OneFOneB().build(ranks=2, micro_batches=2), "always")
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0F1 0R0 0B0 0R1 0B1"
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1B0 1F1 1B1"
    assert schedule.options["recompute"] == "always"
    split = with_recompute(ZeroBubble("h1").build(ranks=1, micro_batches=2), "except_last")
    assert " ".join(map(str, split.actions[0])) == "0F0 0I0 0W0 0F1 0I1 0W1"


def test_never_and_evaluation_change_nothing() -> None:
    schedule = GPipe().build(ranks=2, micro_batches=2)
    assert with_recompute(schedule, "never") is schedule
    evaluation = schedule_of("forward", [[Action(Kind.FORWARD, 0, 0)], [Action(Kind.FORWARD, 1, 0)]])
    assert with_recompute(evaluation, "always") is evaluation
    assert with_recompute(with_recompute(schedule, "always"), "always") == with_recompute(schedule, "always")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ScheduleError, match="got 'sometimes'"):
        with_recompute(GPipe().build(2, 2), "sometimes")  # type: ignore[arg-type]


def test_it_runs_before_the_gradient_arrives() -> None:
    """GPipe: only the last rank has no idle time to recompute in, so the rest costs nothing more."""
    schedule = GPipe().build(ranks=4, micro_batches=8)
    plain, again = simulate(schedule), simulate(with_recompute(schedule, "always"))
    assert again.makespan == plain.makespan + 7
    late = GPipe().build(ranks=4, micro_batches=8)
    assert simulate(late, Costs(1, 3)).makespan == plain.makespan + 8 + 3


def test_memory_and_time_of_except_last() -> None:
    """One stage, two micro-batches: 3 / 3.5 of the throughput (torchgpipe publishes 0.853 and 0.858)."""
    schedule = GPipe().build(ranks=1, micro_batches=2)
    plain, again = simulate(schedule), simulate(with_recompute(schedule, "except_last"))
    assert plain.makespan / Fraction(again.makespan) == Fraction(6, 7)
    eight = GPipe().build(ranks=4, micro_batches=8)
    assert simulate(with_recompute(eight, "always")).peak_activations == (1,) * 4
    assert simulate(with_recompute(eight, "except_last")).peak_activations == (1,) * 4
