"""GPipe and looped BFS: all forwards, then all backwards, of one stage of a rank after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.families.interleaved import Interleaved
from lightning_pipe.schedules.family import Family, Orders


@dataclass(frozen=True)
class GPipe(Family):
    """GPipe (Huang et al. 2019, section 2.3): all forwards, then all backwards, the last micro-batch first.

    Bubble ratio ``(ranks - 1) / (micro_batches + ranks - 1)``; every rank holds the activations of all
    ``micro_batches`` (the paper's M; our ranks are its K)::

        row 0   0 1 2 3                   3 3 2 2 1 1 0 0
        row 1     0 1 2 3             3 3 2 2 1 1 0 0
        row 2       0 1 2 3       3 3 2 2 1 1 0 0
        row 3         0 1 2 3 3 3 2 2 1 1 0 0

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(GPipe().build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(3, 11), (8, 8, 8, 8))
    """

    name: ClassVar[str] = "gpipe"

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """All forwards in order, all backwards in reverse order."""
        return [_there_and_back(range(rank, rank + 1), micro_batches) for rank in range(ranks)]


@dataclass(frozen=True)
class LoopedBFS(Interleaved):
    """Breadth-first pipeline (Lamy-Poirier 2023, arXiv 2211.05953); stage ``s`` is on rank ``s % ranks``.

    A rank runs every micro-batch through its first stage, then every one through its next, and back in the opposite
    order, so that it reads and sums the weights of each stage once in a batch. The bubble is interleaved 1F1B's,
    ``(ranks - 1) / (virtual_stages * micro_batches)`` of the ideal time from ``ranks`` micro-batches on, but all
    ``virtual_stages * micro_batches`` activations are held, as in GPipe, which it is with one virtual stage. The order
    is that of torch's ``ScheduleLoopedBFS``, for any number of micro-batches.

    Args:
        virtual_stages: stages per rank; by default 2, or ``stages / ranks`` where the number of stages is given.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(LoopedBFS(virtual_stages=2).build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(3, 19), (16, 16, 16, 16))
    """

    name: ClassVar[str] = "looped_bfs"

    def published(self, ranks: int, micro_batches: int) -> int:
        """Any number."""
        return micro_batches

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """All forwards, one stage after the other; then all backwards, the last stage and micro-batch first."""
        end = ranks * self.stages_per_rank
        return [_there_and_back(range(rank, end, ranks), micro_batches) for rank in range(ranks)]


def _there_and_back(stages: range, micro_batches: int) -> list[Action]:
    """The forwards of all micro-batches, stage by stage, and the backwards in reverse order."""
    forwards = [Action(Kind.FORWARD, stage, index) for stage in stages for index in range(micro_batches)]
    return forwards + [action._replace(kind=Kind.BACKWARD) for action in reversed(forwards)]
