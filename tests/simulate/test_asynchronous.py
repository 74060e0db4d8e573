"""PipeDream and PipeDream-2BW: versions of the weights as in the papers, and no bubble in the steady state."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import Kind, PipeDream, PipeDream2BW, lower
from lightning_pipe.simulate import Costs, simulate
from tests.support.pairs import slow_but


@pytest.mark.parametrize("ranks", range(1, 7))
def test_pipedream(ranks: int) -> None:
    schedule = PipeDream().build(ranks, micro_batches=24)
    assert not schedule.synchronous
    # Version t - (n-1-s), and n - s of them: section 3.3.
    stages, minibatches = range(ranks), range(24)
    assert schedule.versions == {(s, t): max(0, t - (ranks - 1 - s)) for s in stages for t in minibatches}
    assert schedule.weight_versions == tuple(ranks - stage for stage in stages)
    timeline = simulate(PipeDream().build(ranks, micro_batches=60))
    assert timeline.steady_bubble_ratio == 0
    assert timeline.peak_activations == tuple(ranks - stage for stage in stages)


@pytest.mark.parametrize("ranks", range(1, 7))
def test_vertical_sync(ranks: int) -> None:
    schedule = PipeDream(vertical_sync=True).build(ranks, micro_batches=24)
    assert schedule.versions == {(s, t): max(0, t - (ranks - 1)) for s in range(ranks) for t in range(24)}
    assert schedule.weight_versions == (ranks,) * ranks
    assert schedule.actions == PipeDream().build(ranks, micro_batches=24).actions


@pytest.mark.parametrize("ranks", slow_but(range(1, 7), 1, 4))
@pytest.mark.parametrize("more", [0, 1, 3])
def test_2bw(ranks: int, more: int) -> None:
    size = ranks + more
    schedule = PipeDream2BW(accumulate=size).build(ranks, micro_batches=6 * size)
    batches = range(6 * size)
    assert schedule.versions == {(s, k): max(k // size - 1, 0) for s in range(ranks) for k in batches}
    assert schedule.weight_versions == (2,) * ranks
    # The version that is asked for exists by then: the steps before a forward are never fewer.
    newest = replace(schedule, versions={}).actions
    for order in newest:
        steps = 0
        for action in order:
            steps += action.kind is Kind.STEP
            if action.kind is Kind.FORWARD:
                assert schedule.versions[action.stage, action.micro_batch] <= steps
    timeline = simulate(PipeDream2BW(accumulate=size).build(ranks, micro_batches=20 * size))
    assert timeline.steady_bubble_ratio == 0
    assert timeline.peak_activations == tuple(ranks - stage for stage in range(ranks))


def test_an_incomplete_last_batch_steps_too() -> None:
    schedule = PipeDream2BW().build(ranks=2, micro_batches=5)
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1B0 1F1 1B1 1STEP0 1F2 1B2 1F3 1B3 1STEP2 1F4 1B4 1STEP4"


def test_2bw_needs_as_many_micro_batches_as_ranks() -> None:
    with pytest.raises(ScheduleError, match=r"accumulate=3 and ranks=4.\nHint: Use accumulate=4 or more"):
        PipeDream2BW(accumulate=3).build(ranks=4, micro_batches=8)


@pytest.mark.parametrize(
    ("replicas", "costs"),
    [([2, 1, 1], [2, 1, 1]), ([2, 1], [2, 1]), ([3, 1], [3, 1]), ([1, 3], [1, 3]), ([2, 3], [2, 3])],
)
def test_stages_replicated_as_their_costs_ask_for(replicas: list[int], costs: list[int]) -> None:
    family, ranks = PipeDream(replicas=tuple(replicas)), sum(replicas)
    timeline = simulate(family.build(ranks, micro_batches=120), Costs(costs, [2 * cost for cost in costs]))
    assert timeline.steady_bubble_ratio == 0


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 2), (1, 2, 1), (2, 3), (3, 2, 1), (1, 3, 2)])
def test_minibatches_in_flight(replicas: tuple[int, ...]) -> None:
    """NOAM: the ranks divided by the replicas of the first stage, rounded up; on each of them."""
    ranks = sum(replicas)
    peaks = simulate(PipeDream(replicas=replicas).build(ranks, micro_batches=60)).peak_activations
    assert peaks[: replicas[0]] == (-(-ranks // replicas[0]),) * replicas[0]


def test_a_stage_with_more_replicas_than_those_around_it_waits() -> None:
    """With the paper's minibatches in flight; a whole round-trip of [1, 2, 1] leaves no time between them."""
    schedule = PipeDream(replicas=(1, 2, 1)).build(4, micro_batches=120)
    timeline = simulate(schedule, Costs([1, 2, 1], [2, 4, 2]))
    assert timeline.peak_activations == (4, 2, 2, 1)
    assert timeline.steady_bubble_ratio == Fraction(1, 3)


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 2), (2, 3), (3, 2, 1)])
def test_replicas_of_a_stage_take_turns_and_step_together(replicas: tuple[int, ...]) -> None:
    ranks = sum(replicas)
    for micro_batches in range(1, 14):
        schedule = PipeDream(replicas=replicas).build(ranks, micro_batches)
        assert schedule.placement == PipeDream(replicas=replicas).build(ranks, micro_batches=30).placement
        for stage, copies in enumerate(replicas):
            holders = schedule.holders(stage)
            assert len(holders) == copies
            for kind in (Kind.STEP, Kind.REDUCE):
                orders = [[a.micro_batch for a in lower(schedule)[rank] if a.kind is kind] for rank in holders]
                assert orders == [list(range(0, micro_batches, copies))] * copies
            forwards = [[a.micro_batch for a in schedule.actions[rank] if a.kind is Kind.FORWARD] for rank in holders]
            assert forwards == [list(range(turn, micro_batches, copies)) for turn in range(copies)]


def test_impossible_replicas_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"replicas=\[2, 1\] needs 3 ranks, got ranks=4"):
        PipeDream(replicas=(2, 1)).build(4, 8)
    with pytest.raises(ScheduleError, match=r"has 2 stages, got stages=1"):
        PipeDream(replicas=(2, 1)).build(3, 8, stages=1)
    with pytest.raises(ScheduleError, match=r"replicas\[1\] to be a whole number >= 1, got replicas\[1\]=0"):
        PipeDream(replicas=(2, 0))
