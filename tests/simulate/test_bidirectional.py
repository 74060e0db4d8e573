"""Chimera and GEMS against the Chimera paper's tables, exactly; BitPipe against its authors' drawing."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import GEMS, BitPipe, Chimera, Kind, lower, with_recompute
from lightning_pipe.schedules.csv_format import parse_row
from lightning_pipe.schedules.family import schedule_of
from lightning_pipe.simulate import Costs, simulate
from tests.support.pairs import slow_but

RANKS = slow_but([2, 4, 6, 8, 12, 16], 2, 6, 8)


def pipes_of(ranks: int) -> list[int]:
    return [pipes for pipes in range(2, ranks + 1, 2) if ranks % pipes == 0]


@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_and_activations_of_tables_2_and_3(ranks: int) -> None:
    """Slots of equal length; 2f pipes, N a multiple of D."""
    for pipes in pipes_of(ranks):
        for micro_batches in (ranks, 2 * ranks, 3 * ranks, 4 * ranks):
            timeline = simulate(Chimera(pipes).build(ranks, micro_batches), Costs(1, 1))
            assert timeline.bubble_ratio == Fraction(ranks - pipes, pipes * micro_batches + ranks - pipes)
            peaks = timeline.peak_activations
            assert (min(peaks), max(peaks)) == (ranks - ranks // pipes + 1, ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_backward_twice_as_long_as_forward(ranks: int) -> None:
    """(D-2)/(3N/2+D-2) at N = D; for N = KD directly concatenated units take K(4D-2)+(D-2)."""
    for factor in (1, 2, 3, 4):
        timeline = simulate(Chimera().build(ranks, factor * ranks), Costs(1, 2))
        assert timeline.makespan == factor * (4 * ranks - 2) + ranks - 2
        if factor == 1:
            assert timeline.bubble_ratio == (ranks - 2) / (Fraction(3 * ranks, 2) + ranks - 2)


def test_critical_path_of_six_ranks() -> None:
    """Figure 6: C_f = 6 forwards and C_b = 10 backwards."""
    for forward, backward in ((1, 2), (10, 21), (1, 1)):
        timeline = simulate(Chimera().build(6, 6), Costs(forward, backward))
        assert timeline.makespan == 6 * forward + 10 * backward
    assert simulate(Chimera().build(6, 6), Costs(1, 2)).makespan == 26


@pytest.mark.parametrize("ranks", [4, 6, 8])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_doubling_and_halving_in_one_pass_for_each_slot(ranks: int, factor: int) -> None:
    """(D-2)/(3N+D-2) with N micro-batches of two halves each, which are recomputed at no cost."""
    whole = factor * ranks
    halved = with_recompute(Chimera(scaling="backward_halving").build(ranks, 2 * whole), "always")
    doubled = Chimera(scaling="forward_doubling").build(ranks, 2 * whole)
    assert halved.actions == doubled.actions
    timeline = simulate(doubled, Costs(1, 2, recompute=0))
    assert timeline.bubble_ratio == Fraction(ranks - 2, 3 * whole + ranks - 2)


def test_the_results_of_one_pass_over_two_micro_batches_appear_together() -> None:
    """Two forwards at the first stage, one message for each, two at the last."""
    order = "(0F0;0F1)JOINT_F 0R0 0B0 0R1 0B1", "1F0 1B0 1F1 1B1"
    joint = schedule_of("joint", [parse_row(row.split()) for row in order])
    apart = schedule_of("apart", [[action._replace(joined=False) for action in actions] for actions in joint.actions])
    events = [simulate(schedule, Costs(10, 0, recompute=0)).events for schedule in (joint, apart)]
    first = [[(event.start, event.end) for event in made if event.rank == 0][:2] for made in events]
    assert first == [[(0, 10), (10, 20)]] * 2
    second = [next(event.start for event in made if event.rank == 1) for made in events]
    assert second == [20, 10], "both leave at the end of the pass"


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_two_forwards_of_a_slot_sent_separately_attain_the_printed_formula(ranks: int, factor: int) -> None:
    """(D-2)/(2N+D-2) of table 2, which one pass for each slot does not reach."""
    micro_batches = 2 * factor * ranks
    timeline = simulate(Chimera(scaling="backward_halving").build(ranks, micro_batches), Costs(1, 2))
    assert timeline.bubble_ratio == Fraction(ranks - 2, 2 * micro_batches + ranks - 2)


def test_doubling_with_recomputation() -> None:
    doubled = Chimera(scaling="forward_doubling").build(4, 8)
    timeline = simulate(doubled, Costs(1, 3, recompute=0))
    assert round(timeline.bubble_ratio, 3) == Fraction("0.158")
    timeline = simulate(doubled, Costs(1, 2))
    assert timeline.bubble_ratio == Fraction(1, 9)
    assert timeline.peak_activations == (1, 1, 1, 1)
    assert {action.kind for order in doubled.actions for action in order} == {
        Kind.FORWARD,
        Kind.RECOMPUTE,
        Kind.BACKWARD,
    }


def test_few_micro_batches_are_spread_over_the_pipes() -> None:
    schedule = Chimera().build(ranks=4, micro_batches=3)
    assert {(action.micro_batch, action.pipe) for order in schedule.actions for action in order} == {
        (0, 0),
        (1, 1),
        (2, 0),
    }
    for micro_batches in (1, 2, 3):
        few = Chimera().build(ranks=4, micro_batches=micro_batches)
        assert few.placement == Chimera().build(ranks=4, micro_batches=8).placement
        assert few.holders(0) == (0, 3)
        assert few.loss_ranks == (3, 0)


def test_a_rank_without_micro_batches_of_a_stage_takes_part_in_its_reduction() -> None:
    lowered = lower(Chimera().build(ranks=2, micro_batches=1))
    assert [sorted(a.stage for a in actions if a.kind is Kind.REDUCE) for actions in lowered] == [[0, 1], [0, 1]]


def test_when_copies_are_reduced() -> None:
    def reductions(sync: str) -> list[list[int]]:
        """For every rank the number of actions left after each stage's reduction, by stage."""
        result = []
        for actions in lower(Chimera(sync=sync).build(ranks=4, micro_batches=4)):
            compute = (Kind.FORWARD, Kind.BACKWARD)
            place = {action.stage: index for index, action in enumerate(actions) if action.kind is Kind.REDUCE}
            result.append([sum(a.kind in compute for a in actions[place[s] :]) for s in sorted(place)])
        return result

    assert reductions("lazy") == [[0, 0]] * 4
    eager = reductions("eager")
    assert max(map(max, eager)) > 0
    # Ranks 1 and 2 hold the middle stages, have no idle time after either and reduce both at the end.
    assert reductions("eager_opt") == [eager[0], [0, 0], [0, 0], eager[3]]


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"pipes": 3}, 4, "even number of pipes"),
        ({"pipes": 4}, 6, r"pipes=4 and ranks=6.\nHint: Use pipes=2 or 6."),
        ({}, 5, r"pipes=2 and ranks=5.\nHint: Use an even number of ranks"),
        ({}, 1, "Use an even number of ranks"),
        ({"scaling": "double"}, 4, "scaling='double'"),
        ({"sync": "never"}, 4, "got sync='never'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], ranks: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Chimera(**options).build(ranks, micro_batches=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", slow_but(range(1, 9), 1, 4, 7))
def test_gems(ranks: int) -> None:
    """Two micro-batches take 4D+2 forwards in the steady state: (D-1)/(D+1/2)."""
    timeline = simulate(GEMS().build(ranks, 120), Costs(1, 2))
    assert timeline.peak_activations == (1,) * ranks
    assert timeline.steady_bubble_ratio == (ranks - 1) / (ranks + Fraction(1, 2))
    assert abs(timeline.bubble_ratio - timeline.steady_bubble_ratio) < 0.01


@pytest.mark.parametrize("ranks", RANKS)
def test_bitpipe(ranks: int) -> None:
    """Half of Chimera's idle time at N = D; each further unit adds D-2 forwards of a stage."""
    for units in (1, 2, 3):
        timeline = simulate(BitPipe().build(ranks, units * ranks))
        assert timeline.makespan == 6 * units * ranks + (ranks - 2) * (1 + units)
        assert max(timeline.peak_activations) == 2 * ranks
    one = BitPipe().build(ranks, ranks)
    assert simulate(one).bubble_ratio == Fraction(ranks - 2, 3 * ranks + ranks - 2)
    for stage in range(2 * ranks):
        down = min(stage, 2 * ranks - 1 - stage)
        assert one.holders(stage) == tuple(sorted((down, ranks - 1 - down)))


def test_bitpipe_is_as_its_authors_draw_it() -> None:
    """The drawing of four ranks and four micro-batches, which takes 28 forwards of a stage."""
    schedule = BitPipe().build(4, 4)
    assert [" ".join(f"{each.stage}{each.kind}{each.micro_batch}" for each in order) for order in schedule.actions] == [
        "0F0 0F2 3F1 4F1 3F3 4F3 7F0 7B0 7F2 7B2 4B1 3B1 4B3 3B3 0B0 0B2",
        "1F0 2F1 1F2 2F3 5F1 6F0 5F3 6F2 6B0 5B1 6B2 5B3 2B1 1B0 2B3 1B2",
        "1F1 2F0 1F3 2F2 5F0 6F1 5F2 6F3 6B1 5B0 6B3 5B2 2B0 1B1 2B2 1B3",
        "0F1 0F3 3F0 4F0 3F2 4F2 7F1 7B1 7F3 7B3 4B0 3B0 4B2 3B2 0B1 0B3",
    ]
    assert simulate(schedule).makespan == 28


def test_bitpipe_needs_pairs_of_ranks() -> None:
    with pytest.raises(ScheduleError, match=r"got ranks=3.\nHint: Use an even number"):
        BitPipe().build(3, 6)
