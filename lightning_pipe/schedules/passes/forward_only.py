"""The order for evaluation: forward passes on the placement of a training schedule."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.dependencies import Result, remote_need, result_of
from lightning_pipe.schedules.ir import Schedule


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """Forward passes alone, on the placement of ``schedule``, spread in turn over its pipes.

    All passes take one slot, and a rank takes the latest stage that is ready: what has come furthest leaves the
    pipeline first, so that few boundary values are waiting.

    Args:
        schedule: the training schedule.
        micro_batches: number of micro-batches to evaluate, 1 or more; it may differ from the schedule's.

    Example:
        >>> from lightning_pipe.schedules import GPipe
        >>> evaluation = forward_only(GPipe().build(ranks=2, micro_batches=4), micro_batches=3)
        >>> [" ".join(map(str, actions)) for actions in evaluation.actions]
        ['0F0 0F1 0F2', '1F0 1F1 1F2']
    """
    left: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for stage in reversed(range(schedule.stages)):
        for index in range(micro_batches):
            action = Action(Kind.FORWARD, stage, index, index % schedule.pipes)
            left[schedule.placement[action.pipe, stage]].append(action)
    orders: list[list[Action]] = [[] for _ in left]
    done: set[Result | None] = {None}
    while any(left):
        slot = [next((action for action in own if remote_need(action, schedule.stages) in done), None) for own in left]
        for rank, ready in enumerate(slot):
            if ready is not None:
                left[rank].remove(ready)
                orders[rank].append(ready)
                done.add(result_of(ready))
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
