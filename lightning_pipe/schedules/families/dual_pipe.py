"""DualPipe: two pipelines in opposite directions whose forward and backward passes run in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipe.schedules.action import Action
from lightning_pipe.schedules.families.dual_pipe_v import DualPipeV
from lightning_pipe.schedules.family import Family, Orders


@dataclass(frozen=True)
class DualPipe(Family):
    """DualPipe (DeepSeek-AI 2024): even micro-batches go down the ranks, odd ones up; every stage is on two ranks.

    DualPipeV is DualPipe folded at its middle, so DualPipe is DualPipeV unfolded: of the two ranks that mirror each
    other one runs the order of DualPipeV's, and the other one the same with the pipes exchanged. Bubble
    ``(ranks/2 - 1)(F + 2B - 3W)`` with backward B and its weight part W, a figure of the balanced case; up to
    ``ranks + 1`` stage-micro-batches held. A forward and a backward that the original overlaps are one action; the
    engine runs them one after the other. The published order is for even numbers of micro-batches, ``2 ranks`` or more.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(DualPipe().build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 25), (5, 5, 5, 5))
    """

    name: ClassVar[str] = "dualpipe"
    pipes: ClassVar[int] = 2
    mirrored: ClassVar[bool] = True

    def published(self, ranks: int, micro_batches: int) -> int:
        """As many for each direction, at least twice as many as ranks."""
        return max(micro_batches + micro_batches % 2, 2 * ranks)

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """The original program's order for the first half of the ranks, and its mirror image."""
        folded = DualPipeV().orders(ranks // 2, micro_batches // 2)
        down = [[_unfolded(action, action.stage >= ranks // 2) for action in order] for order in folded]
        up = [[_unfolded(action, action.stage < ranks // 2) for action in order] for order in folded]
        return [*down, *reversed(up)]


def _unfolded(action: Action, up: bool) -> Action:
    return action._replace(micro_batch=2 * (action.micro_batch or 0) + up, pipe=int(up))
