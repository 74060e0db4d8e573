"""The order for evaluation: forward passes on the placement of a training schedule."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.schedules.passes.list_scheduling import list_schedule


def forward_only(schedule: Schedule, micro_batches: int, *, pipes: int | None = None) -> Schedule:
    """Forward passes alone, on the placement of ``schedule``.

    Args:
        schedule: the training schedule.
        micro_batches: number of micro-batches to evaluate, 1 or more; it may differ from the schedule's.
        pipes: spread the micro-batches in turn over this many pipes; by default over all of them.

    Example:
        >>> from lightning_pipe.schedules import GPipe
        >>> evaluation = forward_only(GPipe().build(ranks=2, micro_batches=4), micro_batches=3)
        >>> [" ".join(map(str, actions)) for actions in evaluation.actions]
        ['0F0 0F1 0F2', '1F0 1F1 1F2']
    """
    pipes = schedule.pipes if pipes is None else pipes
    forwards: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    # Later stages first: what has come furthest leaves the pipeline first, so that few boundary values are waiting.
    for stage in reversed(range(schedule.stages)):
        for index in range(micro_batches):
            action = Action(Kind.FORWARD, stage, index, index % pipes)
            forwards[schedule.placement[action.pipe, stage]].append(action)
    orders = list_schedule(forwards, schedule.stages, forward_only=True)
    result = replace(
        schedule,
        micro_batches=micro_batches,
        actions=tuple(tuple(order) for order in orders),
        forward_only=True,
        synchronous=True,
        versions={},
    )
    result.validate()
    return result
