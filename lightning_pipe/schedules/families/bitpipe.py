"""BitPipe: two pipelines in opposite directions, each with two stages on every rank in the shape of a V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.families.one_f_one_b import alternate
from lightning_pipe.schedules.family import Family, Orders


@dataclass(frozen=True)
class BitPipe(Family):
    """BitPipe (Wu et al. 2024, arXiv 2410.19367): Chimera's two directions over interleaved stages.

    Even micro-batches go down the ranks and up again, odd ones up and down again; every stage is on two ranks, and a
    rank holds four. Micro-batches run in units of ``ranks`` (the paper's D), and the first forwards of a unit between
    the last backwards of the unit before, in the order of the authors' program (github.com/wuhouming/BitPipe).

    With backward = 2 forward the bubble ratio of one unit is ``(ranks - 2) / (3 ranks + ranks - 2)``, half of Chimera's
    bubble; each further unit adds ``ranks - 2`` forwards of idle time to its own ``6 ranks`` of work. Up to
    ``2 ranks`` stage-micro-batches are held, ``ranks`` micro-batches' worth.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(BitPipe().build(ranks=4, micro_batches=4))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 7), (7, 8, 8, 7))
    """

    name: ClassVar[str] = "bitpipe"
    stages_per_rank: ClassVar[int] = 2
    pipes: ClassVar[int] = 2
    mirrored: ClassVar[bool] = True

    def published(self, ranks: int, micro_batches: int) -> int:
        """Multiples of the ranks."""
        return -(-micro_batches // ranks) * ranks

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Units of ``ranks`` micro-batches."""
        return [_order(ranks, micro_batches, rank) for rank in range(ranks)]


def _order(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """A unit's first forwards, the others in turn with backwards, and the last backwards with the next unit's."""
    warm_up = ranks + ranks // 2 + min(rank, ranks - 1 - rank)
    rest = 2 * ranks - warm_up
    units = [_unit(ranks, first, rank) for first in range(0, micro_batches, ranks)]
    actions = units[0][0][:warm_up]
    for (forwards, backwards), (following, _) in zip(units, [*units[1:], ([], [])], strict=True):
        actions += alternate(forwards[warm_up:], backwards[:rest], warm_up=0)
        actions += backwards[rest : warm_up + 1]
        actions += alternate(following[: rest - 1], backwards[warm_up + 1 :], warm_up=0)
        actions += following[rest - 1 : warm_up]
    return actions


def _unit(ranks: int, first: int, rank: int) -> tuple[list[Action], list[Action]]:
    """A rank's forwards and backwards of a unit, each in the order in which they could begin.

    The i-th micro-batch of a pipe begins at slot 2i and goes on by one stage in each slot, forward and back again.
    """
    last = 2 * ranks - 1
    forwards, backwards = [], []
    for index in range(ranks):
        place, pipe = divmod(index, 2)
        own = last - ranks - rank if pipe else rank
        for stage in (own, last - own):
            forwards.append((2 * place + stage, Action(Kind.FORWARD, stage, first + index, pipe)))
            backwards.append((2 * place + last - stage, Action(Kind.BACKWARD, stage, first + index, pipe)))
    return [action for _, action in sorted(forwards)], [action for _, action in sorted(backwards)]
