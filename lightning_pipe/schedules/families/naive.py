"""Naive model parallelism: one micro-batch in the whole pipeline at a time."""

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
        """Forward and backward of one micro-batch after the other."""
        return [
            [Action(kind, rank, index) for index in range(micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
            for rank in range(ranks)
        ]
