"""Chimera: pipelines in both directions that fill each other's bubbles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.family import Family, Orders, check_choice, check_counts
from lightning_pipe.schedules.passes.recompute import insert_recompute

Scaling = Literal["direct", "forward_doubling", "backward_halving"]
Sync = Literal["eager", "eager_opt", "lazy"]
Slotted = tuple[int, int, Action]
"""Time slot, turn within the slot, action."""


@dataclass(frozen=True)
class Chimera(Family):
    """Chimera (Li and Hoefler 2021): as many pipelines up the ranks as down, without conflicts.

    Every rank holds ``pipes`` stages; even pipes go down, odd ones up. With slots of equal length and ``m`` a multiple
    of the ranks ``p`` the bubble ratio is ``(p - 2f) / (2fm + p - 2f)`` for ``2f`` pipes (the paper's D, N are our
    ranks and micro-batches; tables 2 and 3), with activations of ``p - p/2f + 1`` to ``p`` micro-batches. With
    backward = 2 forward and ``m = p`` it is ``(p - 2) / (3m/2 + p - 2)`` for two pipes; two pipes and two
    micro-batches on each, drawn with equal slots::

        row 0   0 2   1 1 3 3 0   2
        row 1     0 1 2 3 1 0 3 2
        row 2     1 0 3 2 0 1 2 3
        row 3   1 3   0 0 2 2 1   3

    More micro-batches than ranks are scheduled in units of ``ranks``, one after the other (``"direct"``), or in units
    of ``2 ranks`` that run the forwards of two micro-batches in one slot: ``"forward_doubling"`` for slots in which
    one backward takes as long, with recomputation since the forwards come twice as fast, and ``"backward_halving"``,
    the same order without recomputation, where the two are the halves of what would be one micro-batch elsewhere
    (``micro_batches`` counts the halves). With recomputation, which makes half a backward pass of a slice of the input,
    a forward slot is one action for both, except on the last stage; without it there are two. The paper runs such a
    slot as one pass over both; here its two passes run one behind the other.

    Args:
        pipes: number of pipes, even, a divisor of the ranks.
        scaling: what to do with more micro-batches than ranks.
        sync: when the copies of a stage sum their gradients: as soon as they are complete (``"eager"``), at the end
            (``"lazy"``), or early only for stages with idle time after them (``"eager_opt"``, the paper's default).

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(Chimera(pipes=2).build(ranks=4, micro_batches=4))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 4), (3, 4, 4, 3))
    """

    name: ClassVar[str] = "chimera"

    pipes: int = 2
    scaling: Scaling = "direct"
    sync: Sync = "eager_opt"

    def __post_init__(self) -> None:
        check_counts("Schedule 'chimera'", pipes=self.pipes)
        if self.pipes % 2:
            raise ScheduleError(
                f"Chimera needs an even number of pipes, got pipes={self.pipes}.", hint=f"Use pipes={self.pipes + 1}."
            )
        check_choice("Chimera", get_args(Scaling), scaling=self.scaling)
        check_choice("Chimera", get_args(Sync), sync=self.sync)

    def variants(self) -> tuple[Family, ...]:
        """The three ways to scale."""
        return tuple(replace(self, scaling=scaling) for scaling in get_args(Scaling))

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """As others; the pipes must divide the ranks."""
        if ranks % self.pipes:
            valid = [pipes for pipes in range(2, ranks + 1, 2) if ranks % pipes == 0]
            raise ScheduleError(
                f"Chimera needs pipes to divide the ranks, got pipes={self.pipes} and ranks={ranks}.",
                hint=f"Use pipes={' or '.join(map(str, valid))}." if valid else "Use an even number of ranks.",
            )
        return super().placed(ranks, stages)

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Every action has a slot; a rank's order is that of its slots."""
        slotted: list[list[Slotted]] = [[] for _ in range(ranks)]
        first = slot = 0
        while first < micro_batches:
            left = micro_batches - first
            # A rest that fits into a unit without doubling needs none.
            per_slot = 2 if left > ranks and self.scaling != "direct" else 1
            size = min(left, per_slot * ranks)
            for rank, entry in self._unit(ranks, first, size, slot, per_slot):
                slotted[rank].append(entry)
            first += size
            slot += (1 + per_slot) * ranks
        orders = [[action for _, _, action in sorted(entries)] for entries in slotted]
        return list(map(insert_recompute, orders)) if self.scaling == "forward_doubling" else orders

    def _unit(self, ranks: int, first: int, size: int, slot: int, per_slot: int) -> Iterator[tuple[int, Slotted]]:
        """A unit: the i-th micro-batch of a pipe runs forward at stage s in slot 2i + s, back in 2 (i + p) - 1 - s."""
        for index in range(size):
            group, turn = divmod(index, per_slot)
            pipe, position = group % self.pipes, group // self.pipes
            for stage in range(ranks):
                rank = self._rank(ranks, pipe, stage)
                forward = slot + 2 * position + stage
                backward = slot + 2 * (per_slot * position + turn + ranks) - 1 - stage
                # the last stage has a loss, and what is logged with it, for each micro-batch
                joined = turn > 0 and stage < ranks - 1
                yield rank, (forward, turn, Action(Kind.FORWARD, stage, first + index, pipe, joined=joined))
                yield rank, (backward, 0, Action(Kind.BACKWARD, stage, first + index, pipe))

    def _rank(self, ranks: int, pipe: int, stage: int) -> int:
        """Pipes start evenly spread over the ranks; every second one runs the other way."""
        route = pipe // 2 * (2 * ranks // self.pipes)
        return (route + (ranks - 1 - stage if pipe % 2 else stage)) % ranks
