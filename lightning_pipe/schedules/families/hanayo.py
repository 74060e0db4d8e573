"""Hanayo: stages in waves over the ranks, down and up and down again, with one copy of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.family import Family, Orders


@dataclass(frozen=True)
class Hanayo(Family):
    """Hanayo (Liu et al. 2023, arXiv 2308.15762): the model is cut into ``waves`` waves of ``2 ranks`` stages.

    A wave goes down the ranks and up again, so that stages that meet at the first or last rank need no message. A rank
    has two queues: the forwards of its stages on the way down and then the backwards of those on the way up, and the
    forwards on the way up and then the backwards on the way down. It begins with ``ranks - rank`` passes of the first
    queue and takes turns from there. The order is that of a program which cites the paper (topal-team/elf); the paper's
    own was not at hand.

    With backward = 2 forward and ``ranks`` micro-batches or more the bubble ratio is
    ``(2 ranks - 2) / (3 waves micro_batches + 2 ranks - 2)``; a secondary source quotes the paper, for ``ranks``
    micro-batches, with ``3 waves ranks + ranks - 1`` below. Rank ``r`` holds
    ``2 waves micro_batches + 1 - (ranks - r)`` stage-micro-batches, all of them on the last rank.

    Args:
        waves: by default 1, or ``stages / (2 ranks)`` where the number of stages is given.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(Hanayo(waves=2).build(ranks=4, micro_batches=4))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 5), (13, 14, 15, 16))
    """

    name: ClassVar[str] = "hanayo"

    waves: int | None = None

    def __post_init__(self) -> None:
        if self.waves is not None and self.waves < 1:
            raise ScheduleError(f"Hanayo needs waves >= 1, got {self.waves}.")

    @property
    def stages_per_rank(self) -> int:
        """Two in each wave."""
        return 2 * (self.waves or 1)

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """With the waves that the number of stages asks for, unless they were given."""
        if self.waves is None and stages is not None:
            return Hanayo(max(1, stages // (2 * ranks))).placed(ranks, stages)
        return super().placed(ranks, stages)

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """The two queues of each rank, in turn."""
        indices = range(micro_batches)

        def passes(kind: Kind, stages: range) -> list[Action]:
            return [Action(kind, stage, index) for stage in stages for index in indices]

        def order(rank: int) -> list[Action]:
            end = self.stages_per_rank * ranks
            down, up = range(rank, end, 2 * ranks), range(2 * ranks - 1 - rank, end, 2 * ranks)
            first = passes(Kind.FORWARD, down) + passes(Kind.BACKWARD, up[::-1])
            second = passes(Kind.FORWARD, up) + passes(Kind.BACKWARD, down[::-1])
            begun = min(ranks - rank, micro_batches)
            turns = zip_longest(second, first[begun:])
            return first[:begun] + [action for turn in turns for action in turn if action is not None]

        return [order(rank) for rank in range(ranks)]
