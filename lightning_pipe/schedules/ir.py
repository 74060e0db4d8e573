"""The representation of a pipeline schedule: who computes what, in which order. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from os import PathLike
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

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        pipe = f"@{self.pipe}" if self.pipe else ""
        arrow = "<" if self.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD) else ">"
        return f"{self.stage}{self.kind}{micro_batch}{pipe}" + ("" if self.peer is None else f"{arrow}{self.peer}")


Placement = Mapping[tuple[int, int], int]
"""``(pipe, stage) -> rank``: the rank that computes a stage for the micro-batches of a pipe."""


@dataclass(frozen=True)
class Schedule:
    """The compute order of every rank.

    Inside a schedule a rank is a row: of ``actions``, of a drawing, of a CSV file. Which process computes a row is not
    a schedule's business; messages to users therefore say "row" of a schedule, and "rank" of a process.

    Args:
        name: the family's registered name.
        stages: number of stages the model is cut into.
        ranks: number of ranks in one pipeline.
        micro_batches: number of micro-batches of one batch.
        placement: ``(pipe, stage) -> rank``.
        actions: for every rank its compute actions in order.
        forward_only: evaluation order without backward passes.
        synchronous: all micro-batches of a batch are done before its optimizer step (a flush).
        options: the family's options, for display and for the passes that know them.
        versions: asynchronous schedules only: ``(stage, micro_batch)`` -> the number of steps that the weights have
            seen on which the stage runs the micro-batch, forward and backward.

    Example:
        >>> from lightning_pipe.schedules import OneFOneB
        >>> schedule = OneFOneB().build(ranks=2, micro_batches=2)
        >>> [" ".join(map(str, actions)) for actions in schedule.actions]
        ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
        >>> schedule.loss_ranks
        (1,)
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
    versions: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @cached_property
    def pipes(self) -> int:
        """Number of routes through the ranks."""
        return len({pipe for pipe, _ in self.placement})

    @cached_property
    def loss_ranks(self) -> tuple[int, ...]:
        """The ranks that compute a loss, in the order of their pipes and each once."""
        return self._ends(self.stages - 1)

    @cached_property
    def input_ranks(self) -> tuple[int, ...]:
        """The ranks that hold the first stage, in the order of their pipes and each once."""
        return self._ends(0)

    @cached_property
    def _pipe_of(self) -> dict[int | None, int]:
        forwards = (action for order in self.actions for action in order if action.kind is Kind.FORWARD)
        return {action.micro_batch: action.pipe for action in forwards}

    def _ends(self, stage: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.placement[pipe, stage] for pipe in range(self.pipes)))

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """For every rank the most versions of one stage's weights that it holds at once."""
        from lightning_pipe.schedules.dependencies import live_versions

        return tuple(live_versions(self, rank) for rank in range(self.ranks))

    def rank_of(self, pipe: int, stage: int) -> int:
        """The rank that computes ``stage`` for the micro-batches of ``pipe``."""
        return self.placement[pipe, stage]

    def pipe_of(self, micro_batch: int) -> int:
        """The pipe a micro-batch takes."""
        return self._pipe_of[micro_batch]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights a rank holds, ascending."""
        return tuple(sorted({stage for (_, stage), holder in self.placement.items() if holder == rank}))

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a copy of a stage, ascending: more than one in bidirectional schedules."""
        return tuple(sorted({rank for (_, held), rank in self.placement.items() if held == stage}))

    def validate(self) -> None:
        """Check that the schedule is complete and can run.

        Raises:
            ScheduleError: naming the first offending action.
        """
        from lightning_pipe.schedules.check import check

        check(self)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the compute actions as CSV: one row per rank, cells such as ``2F0`` (stage, kind, micro-batch)."""
        from lightning_pipe.schedules.csv_format import write_csv

        write_csv(self, path)
