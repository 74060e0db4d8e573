"""GEMS: two pipelines in opposite directions that take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.family import Family, Orders


@dataclass(frozen=True)
class GEMS(Family):
    """GEMS (Jain et al. 2020): micro-batches go down and up the ranks in turn, each starting as the last one returns.

    Every rank holds two stages but activations of one micro-batch only. With backward = 2 forward two micro-batches
    take ``4 ranks + 2`` forwards, a bubble ratio of ``(ranks - 1) / (ranks + 1/2)`` in the limit::

        row 0   0         0 1 1 2
        row 1     0     0 1     1 2
        row 2       0 0 1         1 2

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(GEMS().build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(17, 25), (1, 1, 1, 1))
    """

    name: ClassVar[str] = "gems"
    pipes: ClassVar[int] = 2

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """One micro-batch after the other; even ones go down (pipe 0), odd ones up (pipe 1)."""
        return [
            [
                Action(kind, ranks - 1 - rank if index % 2 else rank, index, index % 2)
                for index in range(micro_batches)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            ]
            for rank in range(ranks)
        ]
