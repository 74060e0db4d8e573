"""Is a schedule complete and able to run? The first offending action is named."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import COMPUTE, Action, Kind
from lightning_pipe.schedules.dependencies import (
    FORWARD_DONE,
    GRADIENT_DONE,
    Result,
    local_need,
    play,
)

if TYPE_CHECKING:
    from lightning_pipe.schedules.ir import Schedule

WEIGHT_DONE = "weight gradient"

_GIVES: dict[Kind, tuple[str, ...]] = {
    Kind.FORWARD: (FORWARD_DONE,),
    Kind.BACKWARD: (GRADIENT_DONE, WEIGHT_DONE),
    Kind.BACKWARD_INPUT: (GRADIENT_DONE,),
    Kind.BACKWARD_WEIGHT: (WEIGHT_DONE,),
}
_LETTERS = {FORWARD_DONE: "F", GRADIENT_DONE: "B or I", WEIGHT_DONE: "B or W"}


def check(schedule: Schedule) -> None:
    """Raise a :class:`ScheduleError` unless every micro-batch passes every stage once, in an order that can run."""
    _check_placement(schedule)
    pipes: dict[int | None, int] = {}
    done: set[Result] = set()
    for rank, actions in enumerate(schedule.actions):
        for index, (before, action) in enumerate(zip((None, *actions), actions, strict=False)):
            complaint = _out_of_place(schedule, rank, action) or _out_of_order(action, pipes, done)
            complaint = complaint or (_no_block(schedule, before, action) if action.joined else None)
            if complaint:
                raise ScheduleError(f"Schedule {schedule.name!r}, row {rank}, action {index} ({action}): {complaint}.")
    _check_complete(schedule, done)
    play(schedule)


def _check_placement(schedule: Schedule) -> None:
    wanted = {(pipe, stage) for pipe in range(max(1, schedule.pipes)) for stage in range(schedule.stages)}
    if set(schedule.placement) != wanted:
        odd = min(wanted.symmetric_difference(schedule.placement))
        raise ScheduleError(
            f"Schedule {schedule.name!r}: the placement must name a row for each of {schedule.stages} stages in each "
            f"of {schedule.pipes} pipes; (pipe, stage) {odd} is {'missing' if odd in wanted else 'unknown'}."
        )
    for (pipe, stage), rank in schedule.placement.items():
        if not 0 <= rank < schedule.ranks:
            raise ScheduleError(
                f"Schedule {schedule.name!r}: stage {stage} of pipe {pipe} is placed in row {rank}, "
                f"but rows are 0 to {schedule.ranks - 1}."
            )
    if len(schedule.actions) != schedule.ranks:
        raise ScheduleError(
            f"Schedule {schedule.name!r} has {len(schedule.actions)} rows of actions, but ranks={schedule.ranks}."
        )


def _out_of_place(schedule: Schedule, rank: int, action: Action) -> str | None:
    """What is wrong with an action in itself."""
    kind, stage, micro_batch, pipe, *_ = action
    if kind not in COMPUTE:
        return "only compute actions belong into a schedule; messages and reductions are inserted by lower()"
    if not 0 <= stage < schedule.stages:
        return f"stages are 0 to {schedule.stages - 1}"
    if micro_batch is None or not 0 <= micro_batch < schedule.micro_batches:
        return f"micro-batches are 0 to {schedule.micro_batches - 1}"
    if schedule.forward_only and kind is not Kind.FORWARD:
        return "a forward-only schedule has forward actions only"
    if schedule.placement.get((pipe, stage)) != rank:
        return f"stage {stage} of pipe {pipe} is placed in row {schedule.placement.get((pipe, stage))}"
    return None


def _out_of_order(action: Action, pipes: dict[int | None, int], done: set[Result]) -> str | None:
    """What is wrong with an action after what its rank has done before; notes what it does."""
    kind, stage, micro_batch, pipe, *_ = action
    if kind is not Kind.STEP and pipes.setdefault(micro_batch, pipe) != pipe:
        return f"micro-batch {micro_batch} already takes pipe {pipes[micro_batch]}"
    need = local_need(action)
    if need is not None and need not in done:
        return f"{_LETTERS[need[0]]} of micro-batch {micro_batch} at stage {stage} must come before it"
    if kind is Kind.RECOMPUTE and (GRADIENT_DONE, stage, micro_batch) in done:
        return f"the backward of micro-batch {micro_batch} at stage {stage} comes before it"
    for what in _GIVES.get(kind, ()):
        result = (what, stage, micro_batch)
        if result in done:
            return f"the {what} of micro-batch {micro_batch} at stage {stage} is computed a second time"
        done.add(result)
    return None


def _no_block(schedule: Schedule, first: Action | None, second: Action) -> str | None:
    """Why an action cannot be one with the one before it."""
    if first is None or first.joined or first.kind + second.kind not in ("FF", "FB"):
        return "a forward pass can be one with a forward or whole backward pass right behind it, and nothing else"
    if second.kind is Kind.FORWARD:
        if (first.stage, first.pipe) != (second.stage, second.pipe) or not schedule.synchronous:
            return "two forward passes can be one at the same stage and pipe alone, in schedules with a flush"
        return "the last stage has a loss for each micro-batch" if second.stage == schedule.stages - 1 else None
    return "it needs the forward pass that it is joined to" if first[1:3] == second[1:3] else None


def _check_complete(schedule: Schedule, done: set[Result]) -> None:
    wanted = (FORWARD_DONE,) if schedule.forward_only else (FORWARD_DONE, GRADIENT_DONE, WEIGHT_DONE)
    for what, micro_batch, stage in product(wanted, range(schedule.micro_batches), range(schedule.stages)):
        if (what, stage, micro_batch) not in done:
            raise ScheduleError(
                f"Schedule {schedule.name!r} never runs {_LETTERS[what]} of micro-batch {micro_batch} at stage {stage}."
            )
