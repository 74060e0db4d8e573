"""From a schedule and costs to a timeline, in exactly the arithmetic of the costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.schedules.action import Kind
from lightning_pipe.schedules.dependencies import Number, Timed, play
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.simulate.costs import Costs, at_stage
from lightning_pipe.simulate.steady import steady_bubble_ratio
from lightning_pipe.simulate.timeline import Event, Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule in imagination: every rank works through its actions, each as soon as what it needs is there.

    Args:
        schedule: the schedule.
        costs: times of the actions, in any unit; by default a backward takes two forwards and messages no time.

    Returns:
        The timeline, with its times in the unit of the costs.

    Raises:
        ScheduleError: the costs have another number of stages than the schedule, or a time is negative.

    Example:
        >>> from lightning_pipe.schedules import OneFOneB
        >>> timeline = simulate(OneFOneB().build(ranks=4, micro_batches=8), Costs(forward=1, backward=2))
        >>> timeline.makespan, timeline.bubble_ratio, timeline.peak_activations
        (33, Fraction(3, 11), (4, 3, 2, 1))
    """
    costs = costs or Costs()
    costs.check(schedule.stages)
    played = play(schedule, costs.duration, costs.transfer)
    events = [
        Event(rank, action.kind, action.stage, action.micro_batch, action.pipe, start, end)
        for rank, timed in enumerate(played)
        for action, start, end in timed
    ]
    if schedule.synchronous:
        events += _reductions(schedule, costs, played)
    timeline = Timeline.of(events, ranks=schedule.ranks, title=schedule.name)
    if schedule.synchronous:
        return timeline
    return replace(timeline, synchronous=False, steady=steady_bubble_ratio(timeline))


def _reductions(schedule: Schedule, costs: Costs, played: list[list[Timed]]) -> Iterator[Event]:
    """A stage is reduced once all its holders are done with it and have finished their earlier reductions."""
    complete: dict[int, Number] = {}
    for timed in played:
        for action, _, end in timed:
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                complete[action.stage] = max(end, complete.get(action.stage, end))
    free: list[Number] = [0] * schedule.ranks
    for stage in sorted(complete, key=lambda stage: (complete[stage], -stage)):
        cost, holders = at_stage(costs.reduce, stage), schedule.holders(stage)
        if cost > 0:
            start = max(complete[stage], *(free[rank] for rank in holders))
            for rank in holders:
                free[rank] = start + cost
                yield Event(rank, Kind.REDUCE, stage, None, 0, start, free[rank])
