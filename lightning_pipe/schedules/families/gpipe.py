"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
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
        indices = range(micro_batches)
        return [
            [Action(Kind.FORWARD, rank, index) for index in indices]
            + [Action(Kind.BACKWARD, rank, index) for index in reversed(indices)]
            for rank in range(ranks)
        ]
