"""Runs lowered actions on imaginary ranks whose messages behave like NCCL's at worst."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_pipe.schedules import Action, Kind

SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
Lane = tuple[int, int, str, int]
Content = tuple[int, int, int | None]


def lane_of(rank: int, action: Action) -> Lane:
    """The lane of a message: pair of ranks, direction, pipe."""
    assert action.peer is not None
    return (min(rank, action.peer), max(rank, action.peer), action.kind[-1], action.pipe)


def content(action: Action) -> Content:
    """What a message carries, the same at both ends: the earlier stage, the later one, and the micro-batch."""
    step = {Kind.SEND_FORWARD: 1, Kind.RECEIVE_FORWARD: -1, Kind.SEND_BACKWARD: -1, Kind.RECEIVE_BACKWARD: 1}
    other = action.stage + step[action.kind] if action.other is None else action.other
    return min(action.stage, other), max(action.stage, other), action.micro_batch


def assert_mirrored(lowered: Sequence[Sequence[Action]]) -> None:
    """Every lane's operations are the same, in the same order, at both ends: a send here is a receive there."""
    lanes: dict[Lane, dict[int, list[tuple[bool, Content]]]] = defaultdict(lambda: defaultdict(list))
    for rank, actions in enumerate(lowered):
        for action in actions:
            if action.kind in SENDS or action.kind in RECEIVES:
                lanes[lane_of(rank, action)][rank].append((action.kind in SENDS, content(action)))
    for (low, high, *_), ends in lanes.items():
        assert ends[low] == [(not sends, message) for sends, message in ends[high]]


def run(lowered: Sequence[Sequence[Action]], last_stage: int, *, blocking: bool = False) -> int:
    """Run to the end, or fail; returns the most receives that were posted and not yet used on one rank.

    A message is over when both ends have posted it and every message ahead of it in its lane is over; an action waits
    for the messages it needs. With ``blocking`` a send holds up its rank until the receive is posted.
    """
    world = _World(lowered, last_stage, blocking)
    while sum(world.advance(rank) for rank in range(len(lowered))):
        pass
    stuck = {rank: str(lowered[rank][at]) for rank, at in enumerate(world.position) if at < len(lowered[rank])}
    assert not stuck, f"deadlock at {stuck}"
    assert not any(world.unused), f"receives without a use: {world.unused}"
    return world.most


class _World:
    def __init__(self, lowered: Sequence[Sequence[Action]], last_stage: int, blocking: bool) -> None:
        self.lowered, self.last_stage, self.blocking = lowered, last_stage, blocking
        self.position = [0] * len(lowered)
        self.posted: dict[Lane, dict[int, list[Action]]] = defaultdict(lambda: defaultdict(list))
        self.received: dict[tuple[int, Action], Action] = {}
        self.computed: set[tuple[object, ...]] = set()
        self.unused, self.most = [0] * len(lowered), 0

    def advance(self, rank: int) -> bool:
        """Go on with one rank as far as it goes; whether it went anywhere."""
        before, posted = self.position[rank], False
        for action in self.lowered[rank][before:]:
            if action.peer is not None:
                posted |= self._post(rank, action)
                if self.blocking and action.kind in SENDS and not self._over(rank, action):
                    break
            elif not self._compute(rank, action):
                break
            self.position[rank] += 1
        return posted or self.position[rank] > before

    def _post(self, rank: int, action: Action) -> bool:
        mine = self.posted[lane_of(rank, action)][rank]
        if action in mine:
            return False
        mine.append(action)
        if action.kind in RECEIVES:
            self.received[rank, action._replace(peer=None)] = action
            self.unused[rank] += 1
            self.most = max(self.most, self.unused[rank])
        return True

    def _over(self, rank: int, action: Action) -> bool:
        ends = self.posted[lane_of(rank, action)]
        assert action.peer is not None
        return ends[rank].index(action) < len(ends[action.peer])

    def _compute(self, rank: int, action: Action) -> bool:
        """Compute if the value of the neighbouring stage is here."""
        kind, stage, micro_batch, pipe, *_ = action
        forward = kind is Kind.FORWARD
        if (forward and stage > 0) or (kind in BACKWARDS and stage < self.last_stage):
            neighbour = stage - 1 if forward else stage + 1
            if (rank, forward, neighbour, micro_batch) not in self.computed:
                receive = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
                posted = self.received.get((rank, Action(receive, stage, micro_batch, pipe)))
                if posted is None or not self._over(rank, posted):
                    return False
                self.unused[rank] -= 1
        if forward or kind in BACKWARDS:
            self.computed.add((rank, forward, stage, micro_batch))
        return True
