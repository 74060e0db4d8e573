"""Naive model parallelism and GEMS: one micro-batch after the other, in one direction or in both in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.family import Family, Orders


@dataclass(frozen=True)
class Naive(Family):
    """Model parallelism without pipelining: each micro-batch goes forward and back before the next one starts.

    The baseline that GPipe (Huang et al. 2019, figure 2b) improves on. Bubble ratio ``(ranks - 1) / ranks`` for any
    number of micro-batches; one micro-batch of activations per rank::

        row 0   0             0 0 1             1 1
        row 1     0       0 0       1       1 1
        row 2       0 0 0             1 1 1

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(Naive().build(ranks=4, micro_batches=2))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(3, 4), (1, 1, 1, 1))
    """

    name: ClassVar[str] = "naive"

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Forward and backward of one micro-batch after the other; on pipe 1 the ranks hold the stages in reverse."""
        pipe_of = [index % self.pipes for index in range(micro_batches)]
        return [
            [
                Action(kind, ranks - 1 - rank if pipe else rank, index, pipe)
                for index, pipe in enumerate(pipe_of)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            ]
            for rank in range(ranks)
        ]


@dataclass(frozen=True)
class GEMS(Naive):
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
