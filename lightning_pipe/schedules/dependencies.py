"""What an action waits for, and the times at which a schedule's actions run. Everything else is built on these two."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind, Placement

if TYPE_CHECKING:
    from lightning_pipe.schedules.ir import Schedule

Number = int | float | Fraction

FORWARD_DONE, GRADIENT_DONE = "forward", "gradient"
Result = tuple[str, int, int | None]
"""``(what, stage, micro_batch)``: a value that one action produces and others wait for."""


class Timed(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: Number
    end: Number


def result_of(action: Action) -> Result | None:
    """The value other ranks or stages wait for: a stage's output, or the gradient of a stage's input."""
    if action.kind is Kind.FORWARD:
        return (FORWARD_DONE, action.stage, action.micro_batch)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return (GRADIENT_DONE, action.stage, action.micro_batch)
    return None


def remote_need(action: Action, stages: int) -> Result | None:
    """The value of a neighbouring stage that an action waits for; ``None`` if it needs none."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return (FORWARD_DONE, action.stage - 1, action.micro_batch)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage < stages - 1:
        return (GRADIENT_DONE, action.stage + 1, action.micro_batch)
    return None


def local_need(action: Action) -> Result | None:
    """The value of its own stage that an action waits for; the rank's order must already put it before."""
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.RECOMPUTE):
        return (FORWARD_DONE, action.stage, action.micro_batch)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (GRADIENT_DONE, action.stage, action.micro_batch)
    return None


def consumer_rank(action: Action, stages: int, placement: Placement) -> int | None:
    """The rank that waits for an action's result; ``None`` at the ends of the model."""
    if action.kind is Kind.FORWARD and action.stage < stages - 1:
        return placement[action.pipe, action.stage + 1]
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage > 0:
        return placement[action.pipe, action.stage - 1]
    return None


def play(
    schedule: Schedule,
    duration: Callable[[Action], Number] = lambda action: NOMINAL[action.kind],
    transfer: Callable[[Action], Number] = lambda action: 0,
    release: Callable[[Action], Number] = lambda action: 0,
) -> list[list[Timed]]:
    """Run every rank's actions in order, each as soon as its rank is free and what it needs has arrived.

    Args:
        schedule: the schedule.
        duration: time of an action.
        transfer: time from the end of an action until its result is on another rank.
        release: time before which an action cannot start.

    Returns:
        For every rank its actions with start and end, in exactly the arithmetic of the durations given.

    Raises:
        ScheduleError: the ranks wait for each other.
    """
    queues = schedule.actions
    played: list[list[Timed]] = [[] for _ in queues]
    free: list[Number] = [0] * len(queues)
    done: dict[Result, tuple[Number, int, Action]] = {}
    waiting: dict[Result, int] = {}
    ready = deque(range(len(queues)))
    while ready:
        rank = ready.popleft()
        while len(played[rank]) < len(queues[rank]):
            action = queues[rank][len(played[rank])]
            start = max(free[rank], release(action))
            need = remote_need(action, schedule.stages)
            if need is not None:
                if need not in done:
                    waiting[need] = rank
                    break
                end, producer, produced = done[need]
                start = max(start, end if producer == rank else end + transfer(produced))
            free[rank] = start + duration(action)
            played[rank].append(Timed(action, start, free[rank]))
            result = result_of(action)
            if result is not None:
                done[result] = (free[rank], rank, action)
                if result in waiting:
                    ready.append(waiting.pop(result))
    if any(len(timed) < len(queue) for timed, queue in zip(played, queues, strict=True)):
        raise _stuck(schedule, played)
    return played


def held(orders: Iterable[Iterable[Action]]) -> list[int]:
    """For every rank the most stage-micro-batches whose activations it holds at once.

    An activation is held from the forward that computes it to the last backward action that reads it. Where an
    action recomputes it, it is held only from there: the forward kept no more than the stage's input.
    """
    peaks = []
    for order in orders:
        actions, alive, peak = list(order), set(), 0
        recomputed = {action[1:4] for action in actions if action.kind is Kind.RECOMPUTE}
        for action in actions:
            where = action[1:4]
            if action.kind is Kind.RECOMPUTE or (action.kind is Kind.FORWARD and where not in recomputed):
                alive.add(where)
                peak = max(peak, len(alive))
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                alive.discard(where)
        peaks.append(peak)
    return peaks


def steps_before_forwards(orders: Iterable[Iterable[Action]]) -> dict[tuple[int, int], int]:
    """``(stage, micro_batch)`` -> optimizer steps that the stage's rank has made before the forward pass."""
    seen: dict[tuple[int, int], int] = {}
    for order in orders:
        steps: Counter[int] = Counter()
        for action in order:
            if action.kind is Kind.STEP:
                steps[action.stage] += 1
            elif action.kind is Kind.FORWARD and action.micro_batch is not None:
                seen[action.stage, action.micro_batch] = steps[action.stage]
    return seen


def versions_after(schedule: Schedule, rank: int) -> dict[int, tuple[int, int]]:
    """The versions of a stage's weights that a rank holds, from the oldest still needed to the newest.

    Returns:
        ``index of an action -> (its stage, versions held once it has run)``, for steps and backward actions.
    """
    order = schedule.actions[rank]
    newest = Counter(action.stage for action in order if action.kind is Kind.STEP)
    if not newest:
        return {}
    oldest: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for index, (kind, stage, micro_batch, *_) in reversed(list(enumerate(order))):
        if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            found[index] = stage, newest[stage] - oldest.get(stage, newest[stage]) + 1
            version = schedule.versions.get((stage, micro_batch or 0), 0)
            oldest[stage] = min(version, oldest.get(stage, version))
        elif kind is Kind.STEP:
            found[index] = stage, newest[stage] - oldest.get(stage, newest[stage]) + 1
            newest[stage] -= 1
    return found


def live_versions(schedule: Schedule, rank: int) -> int:
    """The most versions of a stage's weights on a rank: from the oldest still needed after a step to the newest."""
    order = schedule.actions[rank]
    held = versions_after(schedule, rank)
    return max((held[index][1] for index, action in enumerate(order) if action.kind is Kind.STEP), default=1)


NOMINAL: dict[Kind, Number] = {
    Kind.FORWARD: 2,
    Kind.BACKWARD: 4,
    Kind.BACKWARD_INPUT: 2,
    Kind.BACKWARD_WEIGHT: 2,
    Kind.RECOMPUTE: 2,
    Kind.STEP: 1,
}
"""Durations where only their rough proportion matters: the order of messages, list scheduling, deadlock checks."""


def _stuck(schedule: Schedule, played: list[list[Timed]]) -> ScheduleError:
    waits = []
    for rank, (timed, queue) in enumerate(zip(played, schedule.actions, strict=True)):
        if len(timed) < len(queue):
            action = queue[len(timed)]
            need = remote_need(action, schedule.stages)
            assert need is not None
            what, stage, micro_batch = need
            holder = schedule.placement[action.pipe, stage]
            waits.append(
                f"row {rank} cannot run {action} (action {len(timed)}): the {what} of micro-batch {micro_batch} "
                f"at stage {stage} has not been computed by row {holder}"
            )
    return ScheduleError(
        f"Schedule {schedule.name!r} deadlocks: " + "; ".join(waits) + ".",
        hint="Order the actions so that every row's next action depends only on actions that can run before it.",
    )
