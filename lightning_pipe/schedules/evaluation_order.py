"""The endless order in which batches of an evaluation follow each other through the stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """The forward pass of a batch through one stage, on the rank of that stage."""

    rank: int
    stage: int
    batch: int


class EvaluationOrder:
    """What every rank runs, slot by slot, for as long as batches come.

    In each slot a rank runs one forward pass at most: of its stages that have got a batch in earlier slots the latest
    one. All ranks find the same order by integers alone. Two ranks with two stages each, interleaved and as a V::

        slot     0    1    2    3    4    5    6            0    1    2    3    4    5    6
        rank 0  0F0  0F1  2F0  2F1  0F2  0F3  2F2          0F0  0F1  0F2  3F0  0F3  3F1  0F4
        rank 1       1F0  1F1  3F0  3F1  1F2  1F3               1F0  2F0  1F1  2F1  1F2  2F2

    A pass needs the pass of the stage before it, which is in an earlier slot. So ranks that run their passes in this
    order never wait for each other in a circle, wherever in it each of them is.

    A batch begins when the batch as many before it as there are stages has ended. Where each rank has one stage, a rank
    may run some slots more before it knows what the end of a batch has brought: ranks whose batches take a little
    longer on some than on others would otherwise wait for each other in every slot.

    Args:
        ranks: the rank of each stage.

    Attributes:
        ahead: how many slots behind the end of a batch are known when the loop comes to the batch.
        slots: the slots so far that nobody has taken, each with its number.

    Example:
        >>> order = EvaluationOrder([0, 1, 1, 0])
        >>> order.to_end()
        3
        >>> [f"{each.stage}F{each.batch}" for _, slot in order.slots for each in slot if each.rank == 0]
        ['0F0', '0F1', '0F2', '3F0', '0F3']
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._stages = {rank: [s for s, each in enumerate(ranks) if each == rank][::-1] for rank in sorted({*ranks})}
        self._done = [0] * len(ranks)  # batches, by stage
        self._ends: deque[int] = deque()  # the slots of ends that nobody has asked for
        self._number, self._closed = 0, False
        self.ahead = max(1, len(ranks) // 2) if len(self._stages) == len(ranks) else 1
        self.slots: deque[tuple[int, list[Pass]]] = deque()

    @property
    def begun(self) -> int:
        """The number of batches that the first stage has run in the slots so far."""
        return self._done[0]

    def to_end(self) -> int:
        """Go on to `ahead` slots behind the end of the next batch, the first one at first; returns the slot of that."""
        while not self._ends:
            self._go_on()
        end = self._ends.popleft()
        while self._number <= end + self.ahead:
            self._go_on()
        return end

    def close(self) -> None:
        """Let no further batch begin."""
        self._closed = True

    def _go_on(self) -> None:
        passes: list[Pass] = []
        ended = self._done[-1]
        for rank, stages in self._stages.items():
            for stage in stages:
                if self._is_ready(stage):
                    passes.append(Pass(rank, stage, self._done[stage]))
                    break
        for _, stage, _ in passes:
            self._done[stage] += 1
        if self._done[-1] > ended:
            self._ends.append(self._number)
        self.slots.append((self._number, passes))
        self._number += 1

    def _is_ready(self, stage: int) -> bool:
        """Whether a stage can run its next batch in the slot that comes."""
        done, ended = self._done[stage], self._done[-1]
        if stage:
            return done < self._done[stage - 1]
        return not self._closed and done < ended + len(self._done)
