"""The representation of a pipeline schedule: who computes what, in which order. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
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

    def __str__(self) -> str:
        return self.value


class Action(NamedTuple):
    """One step of one rank.

    ``stage`` counts along the model, ``micro_batch`` along the batch (over all pipes), ``pipe`` names the route the
    micro-batch takes through the ranks. ``peer`` is the rank at the other end of a message and ``None`` elsewhere.
    """

    kind: Kind
    stage: int
    micro_batch: int | None
    pipe: int = 0
    peer: int | None = None


Placement = Mapping[tuple[int, int], int]
"""``(pipe, stage) -> rank``: the rank that computes a stage for the micro-batches of a pipe."""


@dataclass(frozen=True)
class Schedule:
    """The compute order of every rank.

    Args:
        name: the family's registered name.
        stages: number of stages the model is cut into.
        ranks: number of ranks in one pipeline.
        micro_batches: number of micro-batches of one batch.
        placement: ``(pipe, stage) -> rank``.
        actions: for every rank its compute actions in order.
        forward_only: evaluation order without backward passes.
        synchronous: all micro-batches of a batch are done before its optimizer step (a flush).
    """

    name: str
    stages: int
    ranks: int
    micro_batches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False
    synchronous: bool = True
    options: Mapping[str, object] = field(default_factory=dict)
