"""Zero bubble and DualPipeV against their papers, exactly."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import DualPipe, DualPipeV, InterleavedZeroBubble, ZeroBubble
from lightning_pipe.simulate import Costs, Timeline, simulate
from tests.support.pairs import slow_but

PARTS = [(1, 1, 1), (10, 11, 9), (1, Fraction(6, 5), Fraction(4, 5)), (3, 3, 2)]


def idle_in_span(timeline: Timeline) -> tuple[float, ...]:
    """For every rank its idle time between its own first and last action: the bubble of the zero-bubble papers."""
    return tuple(
        max(event.end for event in row) - row[0].start - busy  # type: ignore[misc]
        for row, busy in zip(timeline.compute, timeline.busy, strict=True)
    )


@pytest.mark.parametrize(("variant", "depth"), [("h1", 1), ("h2", 2)])
def test_idle_time_in_span_and_peak_of_h1_and_h2(variant: str, depth: int) -> None:
    for ranks in (1, 2, 5):
        for micro_batches in (2 * ranks, 2 * ranks + 1, 4 * ranks):
            schedule = ZeroBubble(variant).build(ranks, micro_batches)
            for forward, for_input, for_weight in PARTS:
                timeline = simulate(schedule, Costs(forward, 0, for_input, for_weight))
                assert idle_in_span(timeline)[0] == (ranks - 1) * (forward + for_input - depth * for_weight)
                assert timeline.peak_activations == (depth * (ranks - 1) + 1,) * ranks


def test_h2_gains_nothing_over_h1_in_makespan_with_a_flush() -> None:
    timelines = [simulate(ZeroBubble(variant).build(4, 8), Costs(1, 2, 1, 1)) for variant in ("h1", "h2")]
    assert [timeline.makespan for timeline in timelines] == [27, 27]
    assert [timeline.bubble_ratio for timeline in timelines] == [Fraction(1, 9)] * 2


def test_the_v_shape_is_never_idle_when_the_parts_are_equal() -> None:
    for ranks in (1, 2, 5):
        for micro_batches in range(2 * ranks, 3 * ranks):
            timeline = simulate(ZeroBubble("v").build(ranks, micro_batches), Costs(1, 2, 1, 1))
            assert idle_in_span(timeline) == (0,) * ranks
            # Two stages on a rank are half as large: 2 ranks of them are 1F1B's memory.
            assert timeline.peak_activations == (2 * ranks,) * ranks


@pytest.mark.parametrize("ranks", slow_but([*range(1, 9), 12], 2, 5))
def test_a_half_and_a_third_of_the_activations(ranks: int) -> None:
    """(p+2)//2 and (p+4)//3 micro-batches, each of two stages; 1F1B holds p."""
    for variant, held in (("v_half", (ranks + 2) // 2), ("v_min", (ranks + 4) // 3)):
        for micro_batches in (2 * ranks, 4 * ranks + 1):
            timeline = simulate(ZeroBubble(variant).build(ranks, micro_batches), Costs(1, 2, 1, 1))  # type: ignore[arg-type]
            assert max(timeline.peak_activations) == 2 * held


@pytest.mark.parametrize(
    ("variant", "share", "idle"),
    [
        ("v_half", Fraction(1, 2), {2: 1, 3: 5, 4: 5, 6: 11}),
        ("v_min", Fraction(2, 3), {2: 1, 3: 5, 4: 11, 6: 17}),
    ],
)
def test_the_bubbles_of_v_half_and_v_min(variant: Any, share: Fraction, idle: dict[int, int]) -> None:
    """In passes of one stage, whatever the number of micro-batches: those of the authors' scheduler.

    Theirs needs 3 for V-Min on two ranks.
    """
    for ranks, passes in idle.items():
        for micro_batches in (2 * ranks, 4 * ranks + 1):
            timeline = simulate(ZeroBubble(variant).build(ranks, micro_batches), Costs(1, 2, 1, 1))
            assert timeline.makespan - 6 * micro_batches == passes
    # 1F1B's is 6 (p - 1) of these passes: what is added for a rank tends to a half and two thirds of its 6
    near, far = (
        simulate(ZeroBubble(variant).build(ranks, 2 * ranks), Costs(1, 2, 1, 1)).makespan - 12 * ranks
        for ranks in (6, 12)
    )
    assert Fraction(far - near, 6 * 6) == share


@pytest.mark.parametrize("parts", PARTS)
def test_v_half_does_not_grow_with_the_micro_batches_where_parts_differ(parts: tuple[Any, ...]) -> None:
    """The condition of the paper is W + 2B >= 2F and W + 2F >= 2B."""
    forward, for_input, for_weight = parts
    costs = Costs(forward, 0, for_input, for_weight)

    def idle(variant: Any, micro_batches: int) -> Fraction:
        work = 2 * micro_batches * sum(parts)
        return Fraction(simulate(ZeroBubble(variant).build(4, micro_batches), costs).makespan - work)

    assert idle("v_half", 32) == idle("v_half", 16)
    assert (idle("v_min", 32) > idle("v_min", 16)) == (forward != for_input or for_input != for_weight)


@pytest.mark.parametrize("virtual", slow_but([1, 2, 3], 2))
def test_interleaved_zero_bubble(virtual: int) -> None:
    """H1's idle time and 1F1B's activations, both on stages of ``1 / virtual`` the size."""
    for ranks in (1, 2, 3, 5):
        for micro_batches in (ranks, 4 * ranks):
            schedule = InterleavedZeroBubble(virtual).build(ranks, micro_batches)
            timeline = simulate(schedule, Costs(1, 2, 1, 1))
            assert timeline.bubble_ratio == Fraction(ranks - 1, 3 * virtual * micro_batches + ranks - 1)
            assert timeline.peak_activations == (virtual * ranks,) * ranks
            for forward, for_input, for_weight in PARTS:
                timeline = simulate(schedule, Costs(forward, 0, for_input, for_weight))
                assert idle_in_span(timeline)[0] == (ranks - 1) * (forward + for_input - for_weight)


def test_interleaved_zero_bubble_with_one_virtual_stage_is_h1() -> None:
    for micro_batches in range(4, 12):
        schedule = InterleavedZeroBubble(virtual_stages=1).build(4, micro_batches)
        assert schedule.actions == ZeroBubble("h1").build(4, micro_batches).actions


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ScheduleError, match="'h1', 'h2', 'v', 'v_half', 'v_min', got variant='h3'"):
        ZeroBubble("h3")  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", range(1, 7))
def test_dual_pipe_v(ranks: int) -> None:
    for micro_batches in (2 * ranks, 2 * ranks + 1, 5 * ranks):
        timeline = simulate(DualPipeV().build(ranks, micro_batches), Costs(1, 2, 1, 1))
        assert idle_in_span(timeline)[0] == ranks - 1
        assert timeline.peak_activations == (2 * ranks + 1,) * ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 8), (4, 20), (5, 20)])
def test_dual_pipe_v_with_overlapped_pairs_counted_as_one(ranks: int, micro_batches: int) -> None:
    """The published (PP/2-1)(F&B + B - 3W) with PP = 2 ranks and F&B = F + B."""
    schedule = DualPipeV().build(ranks, micro_batches)
    for (forward, backward, weight), exact in (((1, 2, 1), True), ((10, 22, 9), False)):
        timeline = simulate(schedule, Costs(forward, backward, backward_weight=weight, overlap=0))
        published, found = (ranks - 1) * (forward + 2 * backward - 3 * weight), idle_in_span(timeline)[0]
        assert found == published if exact else found < published
    if (ranks, micro_batches) == (4, 20):
        assert found == 72


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_dual_pipe(ranks: int) -> None:
    """(PP/2-1)(F&B + B - 3W) with F&B = F + B in the balanced case, PP + 1 activations, two copies of the weights."""
    for micro_batches in (2 * ranks, 2 * ranks + 2, 20):
        schedule = DualPipe().build(ranks, micro_batches)
        timeline = simulate(schedule, Costs(1, 2, 1, 1))
        assert idle_in_span(timeline)[0] == idle_in_span(timeline)[-1] == ranks // 2 - 1
        assert timeline.peak_activations == (ranks + 1,) * ranks
        assert all(schedule.holders(stage) == tuple(sorted((stage, ranks - 1 - stage))) for stage in range(ranks))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (8, 20), (8, 40)])
def test_dual_pipe_takes_as_long_as_its_folded_form(ranks: int, micro_batches: int) -> None:
    for costs in (Costs(1, 2, 1, 1), Costs(10, 22, 13, 9)):
        unfolded = simulate(DualPipe().build(ranks, micro_batches), costs)
        folded = simulate(DualPipeV().build(ranks // 2, micro_batches // 2), costs)
        assert unfolded.makespan == folded.makespan
        assert idle_in_span(unfolded) == (*idle_in_span(folded), *reversed(idle_in_span(folded)))


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_dual_pipe_with_overlapped_pairs_counted_as_one(ranks: int) -> None:
    """The published bubble, with F&B = F + B: 6 units for PP = 8 and 20 micro-batches of F, B, W = 1, 2, 1."""
    timeline = simulate(DualPipe().build(ranks, 20), Costs(1, 2, backward_weight=1, overlap=0))
    assert idle_in_span(timeline)[0] == idle_in_span(timeline)[-1] == (ranks // 2 - 1) * (1 + 2 + 2 - 3)


def test_overlapped_pairs_hide_their_messages() -> None:
    """All messages of the steady state are those of pairs; hidden, they leave that of the others."""
    schedule = DualPipeV().build(4, 20)
    free = simulate(schedule, Costs(2, 4, backward_weight=2, overlap=0))
    spans = [simulate(schedule, Costs(2, 4, backward_weight=2, send=1, overlap=share)).makespan for share in (0, 1)]
    assert free.makespan < spans[1] < spans[0]
    half = simulate(schedule, Costs(2, 4, backward_weight=2, send=1, overlap=Fraction(1, 2)))
    assert spans[1] < half.makespan < spans[0]
    apart = simulate(schedule, Costs(2, 4, backward_weight=2, send=1))
    assert apart.makespan < spans[0], "a pair waits for both of its inputs"


def test_dual_pipe_needs_pairs_of_ranks() -> None:
    with pytest.raises(ScheduleError, match=r"got ranks=3.\nHint: Use an even number"):
        DualPipe().build(3, 8)
