"""Looped BFS: interleaved stages, each of which runs all micro-batches before the rank's next one begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.families.interleaved import Interleaved
from lightning_pipe.schedules.family import Orders


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
        indices = range(micro_batches)

        def order(rank: int) -> list[Action]:
            stages = range(rank, ranks * self.stages_per_rank, ranks)
            forwards = [Action(Kind.FORWARD, stage, index) for stage in stages for index in indices]
            return forwards + [action._replace(kind=Kind.BACKWARD) for action in reversed(forwards)]

        return [order(rank) for rank in range(ranks)]
