"""Interleaved 1F1B: several stages on each rank, so that the pipeline fills and drains in smaller steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.families.one_f_one_b import alternate
from lightning_pipe.schedules.family import Family, Orders, check_counts


@dataclass(frozen=True)
class Interleaved(Family):
    """Interleaved 1F1B (Megatron-LM, Narayanan et al. 2021, section 2.2); stage ``s`` is on rank ``s % ranks``.

    Bubble time ``(ranks - 1) / (virtual_stages * micro_batches)`` of the ideal time, with ``virtual_stages`` times
    1F1B's messages; with one virtual stage it is 1F1B. Otherwise rank ``r`` holds activations of
    ``min(2 (ranks - r - 1) + (virtual_stages - 1) ranks + 1, micro_batches * virtual_stages)`` stage-micro-batches.
    The published order exists for micro-batches that are a multiple of the ranks.

    Args:
        virtual_stages: stages per rank; by default 2, or ``stages / ranks`` where the number of stages is given.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(Interleaved(virtual_stages=2).build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(3, 19), (11, 9, 7, 5))
    """

    name: ClassVar[str] = "interleaved"

    virtual_stages: int | None = None

    def __post_init__(self) -> None:
        check_counts(f"Schedule {self.label!r}", virtual_stages=self.stages_per_rank)

    @property
    def stages_per_rank(self) -> int:
        """The virtual stages."""
        return 2 if self.virtual_stages is None else self.virtual_stages

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """With the virtual stages that the number of stages asks for, unless they were given."""
        if self.virtual_stages is None and stages is not None:
            return replace(self, virtual_stages=max(1, stages // ranks)).placed(ranks, stages)
        return super().placed(ranks, stages)

    def published(self, ranks: int, micro_batches: int) -> int:
        """Multiples of the ranks; with one virtual stage any number."""
        return micro_batches if self.stages_per_rank == 1 else -(-micro_batches // ranks) * ranks

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Micro-batches go through the virtual stages in groups of ``ranks``; warm-up and alternation as in 1F1B."""
        virtual = self.stages_per_rank

        def order(rank: int) -> list[Action]:
            later = ranks - rank - 1
            return alternate(
                sequence(Kind.FORWARD, ranks, micro_batches, range(virtual), rank),
                sequence(Kind.BACKWARD, ranks, micro_batches, range(virtual)[::-1], rank),
                warm_up=min(micro_batches * virtual, 2 * later + (virtual - 1) * ranks if virtual > 1 else later),
            )

        return [order(rank) for rank in range(ranks)]


def sequence(kind: Kind, ranks: int, micro_batches: int, chunks: range, rank: int) -> list[Action]:
    """The order of Megatron: groups of ``ranks`` micro-batches, and in each the virtual stages one after the other."""
    return [
        Action(kind, chunk * ranks + rank, micro_batch)
        for first in range(0, micro_batches, ranks)
        for chunk in chunks
        for micro_batch in range(first, min(first + ranks, micro_batches))
    ]
