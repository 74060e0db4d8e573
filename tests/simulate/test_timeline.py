"""Timelines of measured events, and their repeating part."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import GPipe, Kind, Naive, OneFOneB
from lightning_pipe.simulate import Costs, Event, Timeline, simulate


def test_measured_events_make_a_timeline() -> None:
    measured = [
        (1, "F", 1, 0, 0, 12.0, 13.0),
        (0, "F", 0, 0, 0, 10.0, 11.0),
        (1, Kind.BACKWARD, 1, 0, 0, 13.0, 15.0),
        (0, Kind.BACKWARD, 0, 0, 0, 16.0, 18.0),
        (1, Kind.REDUCE, 1, None, 0, 15.0, 15.5),
    ]
    timeline = Timeline.of(measured, title="measured", unit="s")
    assert timeline.ranks == 2
    assert timeline.events[0] == Event(0, Kind.FORWARD, 0, 0, 0, 0.0, 1.0)
    assert [event.rank for event in timeline.events] == [0, 0, 1, 1, 1]
    assert (timeline.makespan, timeline.busy) == (8.0, (3.0, 3.0))
    assert timeline.bubble_ratio == (16 - 6) / 16
    assert timeline.peak_activations == (1, 1)


def test_ranks_without_events_are_idle() -> None:
    timeline = Timeline.of([(0, "F", 0, 0, 0, 0, 1)], ranks=4)
    assert timeline.bubble_ratio == Fraction(3, 4)
    assert timeline.peak_activations == (1, 0, 0, 0)


def test_impossible_timelines_are_refused() -> None:
    with pytest.raises(ScheduleError, match="at least one event"):
        Timeline.of([])
    with pytest.raises(ScheduleError, match=r"0F0 in row 0 ends 1.0 before it starts"):
        Timeline.of([(0, "F", 0, 0, 0, 2.0, 1.0)])


def test_measured_equals_simulated_if_the_times_do() -> None:
    simulated = simulate(OneFOneB().build(ranks=3, micro_batches=5))
    measured = Timeline.of(reversed(simulated.events), title=simulated.title)
    assert measured == simulated


def test_steady_part_of_1f1b_has_no_bubble() -> None:
    assert simulate(OneFOneB().build(ranks=4, micro_batches=32)).steady_bubble_ratio == 0
    assert simulate(OneFOneB().build(ranks=4, micro_batches=32), Costs(0.1, 0.2)).steady_bubble_ratio == pytest.approx(
        0
    )


def test_steady_part_of_unequal_stages_is_as_slow_as_the_slowest() -> None:
    timeline = simulate(OneFOneB().build(ranks=4, micro_batches=32), Costs([1, 1, 2, 1], [2, 2, 4, 2]))
    assert timeline.steady_bubble_ratio == Fraction(4 * 6 - (3 * 3 + 6), 4 * 6)


def test_steady_part_of_naive_parallelism() -> None:
    assert simulate(Naive().build(ranks=4, micro_batches=12)).steady_bubble_ratio == Fraction(3, 4)


def test_a_schedule_that_does_not_repeat_inside_a_batch_repeats_with_the_batch() -> None:
    timeline = simulate(GPipe().build(ranks=4, micro_batches=12))
    assert timeline.steady_bubble_ratio == timeline.bubble_ratio == Fraction(3, 15)
    short = simulate(OneFOneB().build(ranks=4, micro_batches=2))
    assert short.steady_bubble_ratio == short.bubble_ratio


def test_steady_part_of_a_measured_timeline_bears_noise() -> None:
    simulated = simulate(OneFOneB().build(ranks=2, micro_batches=24))
    noisy = [
        event._replace(start=event.start + 0.01 * (index % 7), end=event.end + 0.01 * (index % 5))
        for index, event in enumerate(simulated.events)
    ]
    assert Timeline.of(noisy, unit="s").steady_bubble_ratio == pytest.approx(0, abs=0.02)


@settings(max_examples=30)
@given(
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 6),
    forward=st.fractions(Fraction(1, 10), 5),
    backward=st.fractions(Fraction(1, 10), 5),
    send=st.fractions(0, 2),
    scale=st.fractions(Fraction(1, 3), 3),
)
def test_ratios_do_not_depend_on_the_unit_of_time(
    ranks: int, micro_batches: int, forward: Fraction, backward: Fraction, send: Fraction, scale: Fraction
) -> None:
    schedule = OneFOneB().build(ranks, micro_batches)
    one = simulate(schedule, Costs(forward, backward, send=send))
    other = simulate(schedule, Costs(forward * scale, backward * scale, send=send * scale))
    assert other.makespan == one.makespan * scale
    assert other.bubble_ratio == one.bubble_ratio
    assert 0 <= one.bubble_ratio < 1
    assert one.makespan >= micro_batches * (forward + backward) + 2 * (ranks - 1) * send
    assert one.peak_activations == other.peak_activations
