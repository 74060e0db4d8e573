"""The published formulas, exactly: every number is an integer or a fraction."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import GPipe, Interleaved, Naive, OneFOneB
from lightning_pipe.schedules.csv_format import parse_row
from lightning_pipe.schedules.family import schedule_of
from lightning_pipe.simulate import Costs, Timeline, simulate
from tests.support.pairs import pairs

SIZES = list(product((1, 2, 3, 7, 16), repeat=2))
"""Ranks and micro-batches."""
COSTS = [Costs(1, 2), Costs(Fraction(2, 3), Fraction(7, 5))]


@pytest.mark.parametrize("family", [GPipe(), OneFOneB()], ids=["gpipe", "1f1b"])
@pytest.mark.parametrize("costs", [COSTS[0], pytest.param(COSTS[1], marks=pytest.mark.slow)], ids=str)
def test_bubble_of_gpipe_and_1f1b(family: GPipe | OneFOneB, costs: Costs) -> None:
    for ranks, micro_batches in SIZES:
        timeline = simulate(family.build(ranks, micro_batches), costs)
        assert timeline.bubble_ratio == Fraction(ranks - 1, micro_batches + ranks - 1)


def test_bubble_of_naive_model_parallelism() -> None:
    for ranks, micro_batches in SIZES:
        assert simulate(Naive().build(ranks, micro_batches)).bubble_ratio == Fraction(ranks - 1, ranks)


@pytest.mark.parametrize(("forward", "backward", "virtual_stages"), pairs([(1, 2), (2, 3)], [2, 3, 4]))
def test_bubble_time_of_interleaved(virtual_stages: int, forward: int, backward: int) -> None:
    """Megatron-LM, section 2.2: a fraction of the ideal time, not of the whole."""
    costs = Costs(Fraction(forward, virtual_stages), Fraction(backward, virtual_stages))
    for ranks in (1, 2, 3, 8):
        for micro_batches in (ranks, 2 * ranks, 5 * ranks):
            timeline = simulate(Interleaved(virtual_stages).build(ranks, micro_batches), costs)
            ideal = micro_batches * (forward + backward)
            assert (timeline.makespan - ideal) / Fraction(ideal) == Fraction(ranks - 1, virtual_stages * micro_batches)


def test_activations_in_flight() -> None:
    for ranks, micro_batches in SIZES:
        assert simulate(Naive().build(ranks, micro_batches)).peak_activations == (1,) * ranks
        assert simulate(GPipe().build(ranks, micro_batches)).peak_activations == (micro_batches,) * ranks
        expected = tuple(min(ranks - rank, micro_batches) for rank in range(ranks))
        assert simulate(OneFOneB().build(ranks, micro_batches)).peak_activations == expected


@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
def test_activations_in_flight_of_interleaved(virtual_stages: int) -> None:
    for ranks in (1, 2, 3, 8):
        for micro_batches in (ranks, 2 * ranks):
            timeline = simulate(Interleaved(virtual_stages).build(ranks, micro_batches))
            whole = micro_batches * virtual_stages
            warm_up = [2 * (ranks - rank - 1) + (virtual_stages - 1) * ranks for rank in range(ranks)]
            assert timeline.peak_activations == tuple(min(more + 1, whole) for more in warm_up)


@pytest.mark.filterwarnings("ignore:.*has no order of its own")
def test_interleaved_off_its_multiples_is_no_worse_than_1f1b() -> None:
    for ranks in (2, 3, 4):
        for micro_batches in (1, 2, 3, 5, 7, 9, 13):
            interleaved = simulate(Interleaved(2).build(ranks, micro_batches), Costs(Fraction(1, 2), 1))
            plain = simulate(OneFOneB().build(ranks, micro_batches), Costs(1, 2))
            assert interleaved.makespan <= plain.makespan
            assert max(interleaved.peak_activations) <= 3 * ranks - 1


def test_gpipe_without_communication_scales_as_the_paper_reports() -> None:
    """Speed-up over two ranks with 32 micro-batches and recomputation (table 2: 1.889 and 3.5 measured)."""
    two, four, eight = (
        simulate(GPipe().build(ranks, 32), Costs(Fraction(1, ranks), Fraction(3, ranks))).makespan
        for ranks in (2, 4, 8)
    )
    assert round(two / Fraction(four), 3) == Fraction("1.886")
    assert round(two / Fraction(eight), 3) == Fraction("3.385")


def two_ranks(*rows: str) -> Timeline:
    return simulate(schedule_of("rows", [parse_row(row.split()) for row in rows]), Costs(1, 2, send=3, reduce=5))


def test_messages_take_time_between_ranks_only() -> None:
    timeline = two_ranks("0F0 1F0 1B0 0B0", "")
    assert timeline.makespan == 1 + 1 + 2 + 5 + 5
    timeline = two_ranks("0F0 0B0", "1F0 1B0")
    assert [(str(event.action), event.start, event.end) for event in timeline.events] == [
        ("0F0", 0, 1),
        ("0B0", 1 + 3 + 1 + 2 + 3, 12),
        ("0REDUCE", 12, 17),
        ("1F0", 4, 5),
        ("1B0", 5, 7),
        ("1REDUCE", 7, 12),
    ]
    assert timeline.busy == (3, 3)
    assert timeline.bubble_ratio == Fraction(2 * 17 - 6, 2 * 17)


def test_a_stage_on_two_ranks_is_reduced_when_both_are_done() -> None:
    timeline = two_ranks("0F0 0B0", "0F1@1 0B1@1 0F2@1 0B2@1")
    reductions = [(event.rank, event.start, event.end) for event in timeline.events if event.kind == "REDUCE"]
    assert reductions == [(0, 6, 11), (1, 6, 11)]


def test_each_part_of_a_split_backward_and_recomputation_cost_what_they_cost() -> None:
    schedule = schedule_of("split", [parse_row(["0F0", "0R0", "0I0", "0W0", "0F1", "0B1"])])
    for costs, expected in (
        (Costs(1, 3), (1, 1, Fraction(3, 2), Fraction(3, 2), 1, 3)),
        (Costs(1, 4), (1, 1, 2, 2, 1, 4)),
        (Costs(1, 4, backward_input=1), (1, 1, 1, 3, 1, 4)),
        (Costs(1, 4, backward_weight=1), (1, 1, 3, 1, 1, 4)),
        (Costs(2, 4, backward_weight=1, backward_input=2, recompute=5), (2, 5, 2, 1, 2, 4)),
        (Costs([2], [3.0], recompute=[7]), (2, 7, 1.5, 1.5, 2, 3)),
    ):
        durations = tuple(event.end - event.start for event in simulate(schedule, costs).events)
        assert durations == expected
    assert isinstance(simulate(schedule, Costs(1, 4)).makespan, int)


def test_recomputed_activations_are_held_from_the_recomputation_on() -> None:
    schedule = schedule_of("recompute", [parse_row(["0F0", "0F1", "0F2", "0B2", "0R1", "0B1", "0R0", "0B0"])])
    assert simulate(schedule).peak_activations == (1,)


def test_stages_of_different_costs() -> None:
    timeline = simulate(GPipe().build(ranks=3, micro_batches=4), Costs([1, 3, 2], [2, 6, 4]))
    assert timeline.makespan == (1 + 2) + 4 * (3 + 6) + (2 + 4)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 2, 3]), "Costs.forward has 3 numbers, but the schedule has 2 stages"),
        (Costs(backward=-1), "Costs.backward must be a number, 0 or more"),
        (Costs(send=[0, -1]), "Costs.send must be a number, 0 or more"),
    ],
)
def test_impossible_costs_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(GPipe().build(ranks=2, micro_batches=2), costs)
