"""Interleaved 1F1B: several stages on each rank, so that the pipeline fills and drains in smaller steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.fallback import list_schedule
from lightning_pipe.schedules.family import Family, Orders
from lightning_pipe.schedules.ir import Action, Kind
from lightning_pipe.schedules.one_f_one_b import alternate


@dataclass(frozen=True)
class Interleaved(Family):
    """Interleaved 1F1B (Megatron-LM, Narayanan et al. 2021, section 2.2); stage ``s`` is on rank ``s % ranks``.

    Bubble time ``(ranks - 1) / (virtual_stages * micro_batches)`` of the ideal time, with ``virtual_stages`` times
    1F1B's messages. Rank ``r`` holds activations of
    ``min(2 (ranks - r - 1) + (virtual_stages - 1) ranks + 1, micro_batches * virtual_stages)`` stage-micro-batches.
    The published order exists for micro-batches that are a multiple of the ranks (cut short elsewhere, it can
    deadlock); other numbers get a list-scheduled order on the same placement, and a warning says so.

    Args:
        virtual_stages: stages per rank; by default 2, or ``stages / ranks`` where the number of stages is given.
    """

    name: ClassVar[str] = "interleaved"

    virtual_stages: int | None = None

    def __post_init__(self) -> None:
        if self.virtual_stages is not None and self.virtual_stages < 1:
            raise ScheduleError(f"Interleaved needs virtual_stages >= 1, got {self.virtual_stages}.")

    @property
    def stages_per_rank(self) -> int:
        """The virtual stages."""
        return 2 if self.virtual_stages is None else self.virtual_stages

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """With the virtual stages that the number of stages asks for, unless they were given."""
        if self.virtual_stages is None and stages is not None:
            return Interleaved(max(1, stages // ranks)).placed(ranks, stages)
        return super().placed(ranks, stages)

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Micro-batches go through the virtual stages in groups of ``ranks``; warm-up and alternation as in 1F1B."""
        virtual = self.stages_per_rank
        total = micro_batches * virtual

        def warm_up(rank: int) -> int:
            return min(total, 2 * (ranks - rank - 1) + (virtual - 1) * ranks)

        forwards = [_sequence(Kind.FORWARD, ranks, micro_batches, range(virtual), rank) for rank in range(ranks)]
        if micro_batches % ranks and virtual > 1:
            below = micro_batches // ranks * ranks
            nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
            warnings.warn(
                f"Interleaved 1F1B is published for micro-batches that are a multiple of the ranks; "
                f"{micro_batches} on {ranks} ranks run in a list-scheduled order instead ({nearest} would fit).",
                stacklevel=2,
            )
            return list_schedule(forwards, ranks * virtual, limits=[warm_up(rank) + 1 for rank in range(ranks)])
        backwards = [
            _sequence(Kind.BACKWARD, ranks, micro_batches, range(virtual)[::-1], rank) for rank in range(ranks)
        ]
        return [alternate(forwards[rank], backwards[rank], warm_up(rank)) for rank in range(ranks)]


def _sequence(kind: Kind, ranks: int, micro_batches: int, chunks: range, rank: int) -> list[Action]:
    """The order of Megatron: groups of ``ranks`` micro-batches, and in each the virtual stages one after the other."""
    return [
        Action(kind, chunk * ranks + rank, micro_batch)
        for first in range(0, micro_batches, ranks)
        for chunk in chunks
        for micro_batch in range(first, min(first + ranks, micro_batches))
    ]
