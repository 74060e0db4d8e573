"""Schedules that repeat a building block: the passes of one micro-batch, at fixed distances in time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from operator import itemgetter

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.dependencies import Result, held, local_need, remote_need, result_of
from lightning_pipe.schedules.family import Orders

Offsets = tuple[int, int, int, int]
"""When a rank of a V begins its passes of micro-batch 0: forward down, forward up, input part up, input part down."""

INTERVAL = 6
"""The next micro-batch follows after as many slots as a rank has passes of one, each of the same length."""

_CHANGES = {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: -1}


def v_half(ranks: int, rank: int) -> Offsets:
    """V-Half: the forwards go down at half speed and up at full speed, and the input parts likewise.

    Args:
        ranks: of the pipeline.
        rank: whose passes.
    """
    apart = 3 * (ranks % 2 == 0)  # else passes of two micro-batches would fall into one slot
    return 2 * rank, 3 * ranks - 2 - rank, 3 * ranks - 1 + apart + 2 * rank, 6 * ranks - 2 + apart - rank


def v_min(ranks: int, rank: int) -> Offsets:
    """V-Min: every pass follows the one before it at once.

    Args:
        ranks: of the pipeline.
        rank: whose passes.
    """
    apart = 2 * (ranks % 3 == 0)
    return rank, 2 * ranks - 1 - rank, 2 * ranks + apart + rank, 4 * ranks - 1 + apart - rank


def repeated(block: Callable[[int, int], Offsets], ranks: int, micro_batches: int) -> Orders:
    """The orders that a building block makes (Qi et al. 2024, arXiv 2405.15362, section 2).

    The block is *repeated* for all micro-batches, weight parts taking the slots that are free. Passes are then run as
    soon as they can (*squeezed*), and *reordered*: a rank that would wait takes the next pass of its row that is ready,
    if its row then never holds more than it would have held. When a rank has no forward down left, weight parts give
    way to all others.

    Args:
        block: gives the offsets of ``(ranks, rank)``.
        ranks: of the pipeline.
        micro_batches: any number.

    Example:
        >>> for order in repeated(v_min, ranks=2, micro_batches=2):
        ...     print(*order)
        0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 0W0 3W1 0W1
        1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    rows = [_Row(_repeat(block(ranks, rank), ranks, rank, micro_batches), ranks) for rank in range(ranks)]
    limit = max(held(map(itemgetter(0), row.left) for row in rows))
    done: set[Result | None] = {None}
    while any(row.left for row in rows):
        taken = [action for row in rows for action in row.take(done, limit)]
        done.update(map(result_of, taken))
    return [row.order for row in rows]


def _repeat(offsets: Offsets, ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """A rank's passes in the order of their slots."""
    down, up = rank, 2 * ranks - 1 - rank
    passes = ((Kind.FORWARD, down), (Kind.FORWARD, up), (Kind.BACKWARD_INPUT, up), (Kind.BACKWARD_INPUT, down))
    slots = {
        begin + INTERVAL * index: Action(kind, stage, index)
        for begin, (kind, stage) in zip(offsets, passes, strict=True)
        for index in range(micro_batches)
    }
    put_off: list[Action] = []
    for slot in range(max(slots) + 1):
        if slot in slots:
            yield slots[slot]
            if slots[slot].kind is Kind.BACKWARD_INPUT:
                put_off.append(slots[slot]._replace(kind=Kind.BACKWARD_WEIGHT))
        elif put_off:
            yield put_off.pop(0)
    yield from put_off


class _Row:
    """The passes of one rank: those that are left, in the order of the repeated block, and those that it has taken."""

    def __init__(self, passes: Iterator[Action], ranks: int) -> None:
        self.ranks = ranks
        # with what each waits for, since most are looked at again and again
        self.left = [(action, local_need(action), remote_need(action, 2 * ranks)) for action in passes]
        self.order: list[Action] = []
        self.held = 0
        self.downwards = sum(self._is_downwards(action) for action, *_ in self.left)

    def take(self, done: Container[Result | None], limit: int) -> Sequence[Action]:
        """The pass that runs next, if one can."""
        index = self._next(done, limit)
        if index is None:
            return ()
        action, *_ = self.left.pop(index)
        self.held += _CHANGES.get(action.kind, 0)
        self.downwards -= self._is_downwards(action)
        self.order.append(action)
        return (action,)

    def _is_downwards(self, action: Action) -> bool:
        return action.kind is Kind.FORWARD and action.stage < self.ranks

    def _next(self, done: Container[Result | None], limit: int) -> int | None:
        weight = None
        most = later = self.held
        for index, (action, own, other) in enumerate(self.left):
            fits = action.kind is not Kind.FORWARD or most < limit
            if fits and own in done and other in done:
                if self.downwards or action.kind is not Kind.BACKWARD_WEIGHT:
                    return index
                weight = index if weight is None else weight
            later += _CHANGES.get(action.kind, 0)
            most = later if later > most else most  # max() takes longer than all the rest
        return weight
