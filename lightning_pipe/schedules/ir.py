"""The representation of a pipeline schedule: who computes what, in which order. Pure data."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from os import PathLike

from lightning_pipe.schedules.action import Action, Placement, cells
from lightning_pipe.schedules.check import check
from lightning_pipe.schedules.dependencies import Timed, play, versions_after


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
        last = self.stages - 1
        return tuple(dict.fromkeys(self.placement[pipe, last] for pipe in range(self.pipes)))

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """For every rank the most versions of one stage's weights that it holds at once."""
        return tuple(
            max((held for _, held in versions_after(self, rank).values()), default=1) for rank in range(self.ranks)
        )

    @cached_property
    def _stages_of(self) -> dict[int, tuple[int, ...]]:
        held = sorted({(rank, stage) for (_, stage), rank in self.placement.items()})
        return {rank: tuple(stage for _, stage in own) for rank, own in groupby(held, itemgetter(0))}

    @cached_property
    def nominal(self) -> list[list[Timed]]:
        """The actions of every rank at nominal times, which order messages and reductions."""
        return play(self)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights a rank holds, ascending."""
        return self._stages_of.get(rank, ())

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a copy of a stage, ascending: more than one in bidirectional schedules."""
        return tuple(sorted({rank for (_, held), rank in self.placement.items() if held == stage}))

    def validate(self) -> None:
        """Check that the schedule is complete and can run.

        Raises:
            ScheduleError: naming the first offending action.
        """
        check(self)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the compute actions as CSV: one row per rank, one cell per action.

        The cell ``2F0`` is the forward pass of micro-batch 0 at stage 2. Letters are ``F``, ``B`` (whole backward),
        ``I`` and ``W`` (its input and weight part) and ``R`` (recompute). Micro-batches on a pipe other than 0 carry it
        behind an ``@``: ``2F0@1``. Two actions that are one share a cell: ``(3F1;2B0)OVERLAP_F_B``, and
        ``(2F0;2F1)JOINT_F``. Files without ``R``, ``@`` and ``JOINT_F`` are torch's compute-only format.

        Args:
            path: the file, which is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(map(cells, self.actions))
