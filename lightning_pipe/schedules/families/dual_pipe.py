"""DualPipe, and DualPipeV in the shape of a V: schedules whose forward and backward passes run in pairs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.family import Family, Orders


@dataclass(frozen=True)
class DualPipeV(Family):
    """DualPipeV (DeepSeek-AI 2025): DualPipe folded at its middle; two stages on each rank in the shape of a V.

    Bubble ``(ranks - 1)(F + 2B - 3W)`` with backward B and its weight part W, a figure of the balanced case; up to
    ``2 ranks + 1`` stage-micro-batches held. A forward and a backward that the original overlaps are one action; the
    engine runs them one after the other. The published order is for ``2 ranks`` micro-batches or more.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(DualPipeV().build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 17), (9, 9, 9, 9))
    """

    name: ClassVar[str] = "dualpipev"
    stages_per_rank: ClassVar[int] = 2

    def published(self, ranks: int, micro_batches: int) -> int:
        """At least as many as stages."""
        return max(micro_batches, 2 * ranks)

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """The eight steps of the original program."""
        return [_Steps(ranks, micro_batches, rank).order() for rank in range(ranks)]


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


class _Steps:
    """The order of one rank. ``down`` and ``up`` are its stages, the original's phases 0 and 1."""

    def __init__(self, ranks: int, micro_batches: int, rank: int) -> None:
        self.rank, self.later = rank, ranks - 1 - rank
        self.steady = micro_batches - 2 * ranks + rank + 1
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self.next = {(step, stage): count() for step in ("forward", "backward") for stage in (self.down, self.up)}
        self.put_off: deque[Action] = deque()

    def order(self) -> list[Action]:
        down, up = self.down, self.up
        for _ in range(2 * self.later):
            self.forward(down)
        for _ in range(self.rank + 1):
            self.forward(down)
            self.forward(up)
        for _ in range(self.later):
            self.backward(up, split=True)
            self.weight()
            self.forward(up)
        for index in range(self.steady):
            self.forward(down)
            # nothing is left for the last rank to overlap with at first; this makes the bubble smaller
            self.backward(up, joined=index > 0 or self.later > 0)
            self.forward(up)
            self.backward(down, joined=True)
        for _ in range(self.later):
            self.backward(up)
            self.forward(up)
            self.backward(down, joined=True)
        # The second half of what is left puts its weight parts off, to fill the end.
        for index in range(2 * (self.rank + 1)):
            self.backward(down if index % 2 else up, split=index > self.rank)
        for _ in range(self.later):
            self.weight()
            self.backward(down, split=True)
        while self.put_off:
            self.weight()
        return self.actions

    def forward(self, stage: int) -> None:
        self.actions.append(Action(Kind.FORWARD, stage, next(self.next["forward", stage])))

    def backward(self, stage: int, *, split: bool = False, joined: bool = False) -> None:
        """A backward pass; split, only its input part, and the weight part is put off."""
        kind = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        self.actions.append(Action(kind, stage, next(self.next["backward", stage]), joined=joined))
        if split:
            self.put_off.append(self.actions[-1]._replace(kind=Kind.BACKWARD_WEIGHT))

    def weight(self) -> None:
        """The weight part that was put off first."""
        if self.put_off:
            self.actions.append(self.put_off.popleft())


def _unfolded(action: Action, up: bool) -> Action:
    return action._replace(micro_batch=2 * (action.micro_batch or 0) + up, pipe=int(up))
