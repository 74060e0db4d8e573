"""From a schedule and costs to a timeline, in exactly the arithmetic of the costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from lightning_pipe.schedules.action import Kind
from lightning_pipe.schedules.dependencies import Number, Timed, play
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.schedules.passes.lower import put_off, reductions
from lightning_pipe.simulate.costs import Costs, at_stage
from lightning_pipe.simulate.timeline import Event, Timeline

_STEADY = 24
"""Batches, of as many micro-batches as ranks at least, after which a schedule without a flush repeats for sure."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule in imagination: every rank works through its actions, each as soon as what it needs is there.

    Args:
        schedule: the schedule.
        costs: times of the actions, in any unit; by default a backward takes two forwards and messages no time.

    Returns:
        The timeline, with its times in the unit of the costs. Before the first and between the actions of a rank lie
        its waits for messages and what messages occupy it.

    Raises:
        ScheduleError: the costs have another number of stages than the schedule, or a time is negative.

    Example:
        >>> from lightning_pipe.schedules import OneFOneB
        >>> timeline = simulate(OneFOneB().build(ranks=4, micro_batches=8), Costs(forward=1, backward=2))
        >>> timeline.makespan, timeline.bubble_ratio, timeline.peak_activations
        (33, Fraction(3, 11), (4, 3, 2, 1))
    """
    played, ends = _run(schedule, costs or Costs())
    events = [
        Event(rank, action.kind, action.stage, action.micro_batch, action.pipe, start, end)
        for rank, timed in enumerate(played)
        for action, start, end in timed
    ]
    timeline = Timeline.of([*events, *ends], ranks=schedule.ranks, title=schedule.name)
    return replace(timeline, synchronous=schedule.synchronous)


def simulate_batch(build: Callable[[int], Schedule], micro_batches: int, costs: Costs | None = None) -> Timeline:
    """The timeline of a batch; without a flush it knows the steady state, which needs more micro-batches to show.

    Args:
        build: makes the schedule for a number of micro-batches.
        micro_batches: of the batch.
        costs: times of the actions.
    """
    timeline = simulate(build(micro_batches), costs)
    if timeline.synchronous:
        return timeline
    run = simulate(build(_STEADY * max(micro_batches, timeline.ranks)), costs)
    return replace(timeline, steady=run.steady_bubble_ratio)


def makespan(schedule: Schedule, costs: Costs) -> Number:
    """That of `simulate` alone, for who compares many schedules: a timeline takes as long again."""
    played, ends = _run(schedule, costs)
    return max(chain((event.end for event in ends), (timed[-1].end for timed in played if timed)))


def _run(schedule: Schedule, costs: Costs) -> tuple[list[list[Timed]], list[Event]]:
    """What every rank computes, and what follows at the end of a batch."""
    costs.check(schedule.stages)
    options = {"occupies": costs.occupies, "links": costs.links, "overlap": costs.overlap}
    played = play(schedule, costs.duration, costs.transfer, **options)  # type: ignore[arg-type]
    flushed = schedule.synchronous and not schedule.forward_only
    return played, [*_ends(schedule, costs, played)] if flushed else []


def _ends(schedule: Schedule, costs: Costs, played: Sequence[Sequence[Timed]]) -> Iterator[Event]:
    """Reductions and optimizer steps of a batch.

    A stage is reduced once all its holders are done with it and have finished their earlier reductions, in the order
    of the engine. A rank steps after its own reductions and its last action.
    """
    free: list[Number] = [0] * schedule.ranks
    over = [timed[-1].end if timed else 0 for timed in played]
    if any(at_stage(costs.reduce, stage) for stage in range(schedule.stages)):
        complete: dict[int, Number] = {}  # when the gradients of each stage are complete on all its holders
        for action, _, end in (entry for timed in played for entry in timed):
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                complete[action.stage] = max(end, complete.get(action.stage, end))
        late = put_off(schedule)
        for stage in reductions(late, complete):
            cost, holders = at_stage(costs.reduce, stage), schedule.holders(stage)
            if cost > 0:
                at_end = stage in late or not costs.overlap_reduce
                start = max(
                    *(over[rank] if at_end else complete[stage] for rank in holders), *(free[r] for r in holders)
                )
                for rank in holders:
                    free[rank] = start + cost
                    yield Event(rank, Kind.REDUCE, stage, None, 0, start, free[rank])
    if any(at_stage(costs.step, stage) for stage in range(schedule.stages)):
        for rank in range(schedule.ranks):
            now = max(free[rank], over[rank])
            for stage in schedule.stages_of(rank):
                start, now = now, now + at_stage(costs.step, stage)
                yield Event(rank, Kind.STEP, stage, None, 0, start, now)
