"""Interleaved zero bubble: interleaved 1F1B whose backward passes are split to fill idle time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Kind
from lightning_pipe.schedules.families.interleaved import Interleaved, sequence
from lightning_pipe.schedules.families.zero_bubble import split
from lightning_pipe.schedules.family import Orders


@dataclass(frozen=True)
class InterleavedZeroBubble(Interleaved):
    """Zero bubble (Qi et al. 2024, H1) over interleaved stages; stage ``s`` is on rank ``s % ranks``.

    Micro-batches take Megatron-LM's order, with one more forward to warm up for each rank behind, instead of two, and
    rank ``r`` puts its weight parts off by ``r`` input parts. This is torch's ``ScheduleInterleavedZeroBubble`` for
    micro-batches that are a multiple of the ranks; for others torch changes the size of its groups, and here the order
    of the next multiple is cut short. With one virtual stage it is H1.

    With a multiple of ``ranks`` micro-batches rank 0 is idle inside its span for H1's ``(ranks - 1)(F + I - W)``, with
    the parts of one of the smaller stages; with equal parts that is ``(ranks - 1) / (3 virtual_stages micro_batches)``
    of the ideal time. Every rank holds ``virtual_stages * ranks`` stage-micro-batches, 1F1B's memory.

    Args:
        virtual_stages: stages per rank; by default 2, or ``stages / ranks`` where the number of stages is given.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(InterleavedZeroBubble(virtual_stages=2).build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 17), (8, 8, 8, 8))
    """

    name: ClassVar[str] = "interleaved_zero_bubble"

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Interleaved 1F1B with input parts, each followed by the weight part of ``rank`` input parts before."""
        virtual = self.stages_per_rank
        return [
            split(
                sequence(Kind.FORWARD, ranks, micro_batches, range(virtual), rank),
                sequence(Kind.BACKWARD_INPUT, ranks, micro_batches, range(virtual)[::-1], rank),
                warm_up=(virtual - 1) * ranks + ranks - 1 - rank,
                put_off=rank,
            )
            for rank in range(ranks)
        ]
