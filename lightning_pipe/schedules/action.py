"""One step of one rank: the unit that schedules are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What one action does. The values are the letters used in drawings and CSV files."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE"
    STEP = "STEP"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE, Kind.STEP})
"""The kinds a schedule consists of; the others are inserted by :func:`lightning_pipe.schedules.passes.lower`."""


class Action(NamedTuple):
    """One step of one rank.

    ``stage`` counts along the model, ``micro_batch`` along the batch (over all pipes), ``pipe`` names the route the
    micro-batch takes through the ranks. ``peer`` is the rank at the other end of a message and ``None`` elsewhere;
    ``other`` is the stage at the other end of a message that skips the stages between.

    An action may be ``joined`` to the one before it, a forward pass, and is then one with it. A backward pass overlaps
    it where a device can do so. A forward pass of the same stage shares a slot with it: where both are recomputed, what
    both leave is there at its end. The engine runs the two one after the other.

    Example:
        >>> print(Action(Kind.FORWARD, stage=2, micro_batch=0), Action(Kind.SEND_FORWARD, 2, 0, pipe=1, peer=3))
        2F0 2SEND_F0@1>3
    """

    kind: Kind
    stage: int
    micro_batch: int | None
    pipe: int = 0
    peer: int | None = None
    other: int | None = None
    joined: bool = False

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        pipe = f"@{self.pipe}" if self.pipe else ""
        arrow = "<" if self.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD) else ">"
        return f"{self.stage}{self.kind}{micro_batch}{pipe}" + ("" if self.peer is None else f"{arrow}{self.peer}")


def blocks(order: Iterable[Action]) -> list[tuple[Action, ...]]:
    """The actions of one rank, those together that are one."""
    found: list[tuple[Action, ...]] = []
    for action in order:
        if action.joined and found:
            found[-1] += (action,)
        else:
            found.append((action,))
    return found


def joined(actions: Iterable[Action]) -> Iterator[Action]:
    """Some actions as one."""
    return (action._replace(joined=index > 0) for index, action in enumerate(actions))


def cells(order: Iterable[Action]) -> Iterator[str]:
    """The actions of one rank as a CSV file has them, one cell for each block."""
    for block in blocks(order):
        text = ";".join(map(str, block))
        yield text if len(block) == 1 else f"({text}){joint_name(block)}"


def joint_name(block: Iterable[Action]) -> str:
    """What cells call a forward and a backward pass that are one action, in torch as well, and two forward passes."""
    return "JOINT_F" if all(action.kind is Kind.FORWARD for action in block) else "OVERLAP_F_B"


Placement = Mapping[tuple[int, int], int]
"""``(pipe, stage) -> rank``: the rank that computes a stage for the micro-batches of a pipe."""
