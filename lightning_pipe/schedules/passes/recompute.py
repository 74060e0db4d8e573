"""Recomputation as an action of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind, blocks
from lightning_pipe.schedules.ir import Schedule

Mode = Literal["never", "always", "except_last"]
Place = tuple[int, int | None, int]
"""``(stage, micro_batch, pipe)``."""

_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def with_recompute(schedule: Schedule, mode: Mode) -> Schedule:
    """Let stages keep only their inputs, and compute their activations again before the backward pass.

    The recomputation stands right before the backward action. It does not wait for the gradient, so it runs in the
    idle time before the gradient arrives. A forward whose own backward follows at once, as on the last stage of 1F1B,
    keeps its activations: to compute them again would cost time and save nothing.

    Args:
        schedule: the schedule.
        mode: ``"never"``, ``"always"``, or ``"except_last"``: not for the micro-batch that a stage runs forward last,
            whose backward pass in GPipe follows at once.

    Example:
        >>> from lightning_pipe.schedules import GPipe
        >>> print(*with_recompute(GPipe().build(ranks=1, micro_batches=2), "except_last").actions[0])
        0F0 0F1 0B1 0R0 0B0
    """
    if mode not in ("never", "always", "except_last"):
        raise ScheduleError(f"recompute is 'never', 'always' or 'except_last', got {mode!r}.")
    if mode == "never" or schedule.forward_only:
        return schedule
    actions = tuple(
        tuple(
            insert_recompute(order, kept=_at_once(order) | (_last_forwards(order) if mode == "except_last" else set()))
        )
        for order in schedule.actions
    )
    return replace(schedule, actions=actions, options={**schedule.options, "recompute": mode})


def insert_recompute(order: Iterable[Action], kept: Iterable[Place] = ()) -> list[Action]:
    """Recompute right before each backward, unless its activations are ``kept`` or recomputed already."""
    result: list[Action] = []
    ready: set[Place] = set(kept)
    for block in blocks(order):
        for action in block:
            if action.kind is Kind.RECOMPUTE:
                ready.add(action[1:4])
            elif action.kind in _BACKWARD and action[1:4] not in ready:
                result.append(action._replace(kind=Kind.RECOMPUTE, joined=False))
        result += block
    return result


def _at_once(order: Iterable[Action]) -> set[Place]:
    return {
        action[1:4]
        for action, following in pairwise(order)
        if action.kind is Kind.FORWARD and following.kind in _BACKWARD and action[1:4] == following[1:4]
    }


def _last_forwards(order: Iterable[Action]) -> set[Place]:
    last = {(action.stage, action.pipe): action for action in order if action.kind is Kind.FORWARD}
    return {action[1:4] for action in last.values()}
