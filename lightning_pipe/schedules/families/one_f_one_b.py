"""1F1B with a flush: the schedule of PipeDream-Flush and DAPPLE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.family import Family, Orders

Pass = TypeVar("Pass")
"""An action, or several of one micro-batch."""


@dataclass(frozen=True)
class OneFOneB(Family):
    """One forward, one backward, with a flush (PipeDream-Flush, Narayanan et al. 2021; DAPPLE, Fan et al. 2021).

    Rank ``r`` runs ``ranks - 1 - r`` forwards to warm up, then alternates. GPipe's bubble ratio,
    ``(ranks - 1) / (micro_batches + ranks - 1)``, with activations of only ``min(ranks - r, micro_batches)``
    micro-batches::

        row 0   0 1 2 3             0 0   1 1   2 2   3 3
        row 1     0 1 2         0 0 3 1 1   2 2   3 3
        row 2       0 1     0 0 2 1 1 3 2 2   3 3
        row 3         0 0 0 1 1 1 2 2 2 3 3 3

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(OneFOneB().build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(3, 11), (4, 3, 2, 1))
    """

    name: ClassVar[str] = "1f1b"

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Warm-up forwards, alternation, cool-down backwards."""
        return [
            alternate(
                [Action(Kind.FORWARD, rank, index) for index in range(micro_batches)],
                [Action(Kind.BACKWARD, rank, index) for index in range(micro_batches)],
                warm_up=ranks - 1 - rank,
            )
            for rank in range(ranks)
        ]


def alternate(forwards: Sequence[Pass], backwards: Sequence[Pass], warm_up: int) -> list[Pass]:
    """``warm_up`` forwards, then forward and backward in turn, then the backwards that are left."""
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + list(backwards[max(0, len(forwards) - warm_up) :])
