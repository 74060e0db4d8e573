"""From compute order to what a rank really does: sends, receives and reductions inserted between the actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.dependencies import (
    FORWARD_DONE,
    Number,
    Timed,
    in_one,
    result_of,
)
from lightning_pipe.schedules.ir import Schedule

_MESSAGE = {
    Kind.FORWARD: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
    Kind.BACKWARD: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
    Kind.BACKWARD_INPUT: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}
_WEIGHT_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)

Lowered = tuple[tuple[Action, ...], ...]
Slots = list[list[tuple[Number, Action]]]
"""What goes before each action of a rank, or after the first 0, 1, … actions; with the time that orders it."""


class _Message(NamedTuple):
    """A value on its way between two ranks; the fields sort messages by the time they are produced.

    ``producer`` and ``consumer`` are indices into the ranks' lists, ``known`` is the first index of the receiver at
    which it can prepare for the message.
    """

    sent: Number
    sender: int
    producer: int
    receiver: int
    consumer: int
    known: int
    action: Action
    stage: int

    def ends(self) -> tuple[Action, Action]:
        """The send and the receive action; each names the other's stage where that is not the next one."""
        send, receive = _MESSAGE[self.action.kind]
        mine, other, action = self.action.stage, self.stage, self.action._replace(joined=False)
        skips = abs(other - mine) != 1
        return (
            action._replace(kind=send, peer=self.receiver, other=other if skips else None),
            action._replace(kind=receive, peer=self.sender, stage=other, other=mine if skips else None),
        )


def lower(schedule: Schedule, skips: Iterable[tuple[int, int]] = ()) -> Lowered:
    """Insert messages and reductions into every rank's compute actions.

    A send follows the action that produces the value. Its receive stands one compute action before the one that
    needs the value (the receive of a gradient after the stage's own forward of the micro-batch at least), so that the
    transfer hides behind compute and buffers follow the micro-batches in flight. It may stand earlier, so that this
    holds:

    For every pair of ranks and every lane (direction and pipe) the messages are ordered by the time at which they are
    produced in a simulation of all ranks, and both ends post their sends and receives of the lane in this order. So
    lanes may be first-in-first-out, in both directions together, and nothing deadlocks: an action that runs at time t
    of the simulation needs only messages produced before t, and so does every message ahead of them in their lanes.

    A reduction of a stage's gradients follows the last backward action of the stage on its rank, unless the
    schedule's option ``sync`` puts it off to the end: ``"lazy"`` always, ``"eager_opt"`` where one of the ranks that
    hold the stage has no idle time after it. Reductions are in one order that is the same on all ranks.

    Without a flush there is a reduction before every step, of the same stage and with the micro-batch of the step.

    Args:
        schedule: the compute order.
        skips: pairs of stages, not neighbours, of which the first sends each micro-batch something of its own, and
            gets a gradient back.

    Returns:
        For every rank its actions. Sends and receives name the stage of their own rank: the action
        ``SEND_FORWARD(stage=s)`` on one rank meets ``RECEIVE_FORWARD(stage=s+1)`` on its peer.

    Example:
        >>> from lightning_pipe.schedules import GPipe
        >>> for actions in lower(GPipe().build(ranks=2, micro_batches=1)):
        ...     print(*actions)
        0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE
    """
    played = schedule.nominal
    before: list[Slots] = [[[] for _ in timed] for timed in played]
    after: list[Slots] = [[[] for _ in range(len(timed) + 1)] for timed in played]
    for lane in _lanes(schedule, played, skips):
        _place_lane(sorted(lane), before, after)
    if not schedule.synchronous:
        _place_reductions_of_steps(played, after)
    elif not schedule.forward_only:
        _place_reductions(schedule, played, after)
    return tuple(tuple(_merge(timed, before[rank], after[rank])) for rank, timed in enumerate(played))


def _merge(timed: list[Timed], before: Slots, after: Slots) -> Iterable[Action]:
    yield from (action for _, action in after[0])
    for span in dict.fromkeys(_spans(timed)):
        slots = (slot for index in span for slot in before[index])
        yield from (action for _, action in sorted(slots, key=lambda timed: timed[0]))
        yield from (timed[index].action for index in span)
        yield from (action for index in span for _, action in after[index + 1])


def _spans(timed: list[Timed]) -> list[range]:
    """For each action of a rank the indices of those that run as one with it: no message comes between them."""
    blocks = in_one([entry.action for entry in timed], overlaps=False)
    ends = [*accumulate(map(len, blocks))]
    return [range(end - len(block), end) for block, end in zip(blocks, ends, strict=True) for _ in block]


def _lanes(schedule: Schedule, played: list[list[Timed]], skips: Iterable[tuple[int, int]]) -> Iterable[list[_Message]]:
    """All messages, one list per pair of ranks, direction and pipe."""
    steps = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
    beyond: dict[int, list[int]] = defaultdict(list)
    before: dict[int, list[int]] = defaultdict(list)
    for early, late in [*steps, *skips]:
        beyond[early].append(late)
        before[late].append(early)
    producers = {
        result: (rank, span, action)
        for rank, timed in enumerate(played)
        for (action, _, _), span in zip(timed, _spans(timed), strict=True)
        if (result := result_of(action)) is not None
    }
    lanes: dict[tuple[int, int, Kind, int], list[_Message]] = defaultdict(list)
    for (what, at, micro_batch), (rank, span, action) in producers.items():
        index, end = span[-1], played[rank][span[-1]].end
        for stage in (beyond if what == FORWARD_DONE else before)[at]:
            peer, consumer, _ = producers[what, stage, micro_batch]
            if peer != rank:
                # What a gradient looks like is known once the receiver's own forward has run.
                known = 0 if what == FORWARD_DONE else producers[FORWARD_DONE, stage, micro_batch][1].stop
                lane = (min(rank, peer), max(rank, peer), _MESSAGE[action.kind][0], action.pipe)
                lanes[lane].append(_Message(end, rank, index, peer, consumer[0], known, action, stage))
    return lanes.values()


def _place_lane(lane: list[_Message], before: list[Slots], after: list[Slots]) -> None:
    """Put a lane's sends behind their producers, its receives before their consumers, in the lane's order."""
    earliest: dict[int, int] = defaultdict(int)
    lower_bounds = []
    for message in lane:
        earliest[message.receiver] = max(earliest[message.receiver], message.known)
        lower_bounds.append(earliest[message.receiver])
        earliest[message.sender] = message.producer + 1
    latest: dict[int, int] = {}
    for message, lower_bound in zip(reversed(lane), reversed(lower_bounds), strict=True):
        send, receive = message.ends()
        after[message.sender][message.producer + 1].insert(0, (message.sent, send))
        latest[message.sender] = message.producer
        slot = max(lower_bound, min(message.consumer - 1, latest.get(message.receiver, message.consumer)))
        before[message.receiver][slot].insert(0, (message.sent, receive))
        latest[message.receiver] = slot


def _place_reductions(schedule: Schedule, played: list[list[Timed]], after: list[Slots]) -> None:
    """One reduction per stage and holder, when the stage's gradients are complete there, in one order for all ranks."""
    last = _last_gradients(schedule)
    complete: dict[int, Number] = {}
    for (rank, stage), index in last.items():
        end = played[rank][index - 1].end
        complete[stage] = max(end, complete.get(stage, end))
    slots = [0] * len(played)
    late = put_off(schedule)
    for stage in reductions(late, complete):
        for rank in schedule.holders(stage):
            # A rank that had no micro-batch of the stage takes part all the same: its copy must not fall behind.
            slots[rank] = max(slots[rank], len(played[rank]) if stage in late else last.get((rank, stage), 0))
            after[rank][slots[rank]].append((complete[stage], Action(Kind.REDUCE, stage, None)))


def _last_gradients(schedule: Schedule) -> dict[tuple[int, int], int]:
    """For each rank and stage the number of the rank's actions up to the stage's last gradient."""
    return {
        (rank, action.stage): index + 1
        for rank, order in enumerate(schedule.actions)
        for index, action in enumerate(order)
        if action.kind in _WEIGHT_GRADIENT
    }


def reductions(late: Container[int], complete: Mapping[int, Number]) -> list[int]:
    """The stages in the order of their reductions, which is the same on all ranks.

    Args:
        late: the stages whose reductions are put off to the end of the batch.
        complete: when the gradients of each stage are complete on all its holders.
    """
    return [-negative for _, _, negative in sorted((stage in late, complete[stage], -stage) for stage in complete)]


def put_off(schedule: Schedule) -> frozenset[int]:
    """The stages whose reductions the schedule's option ``sync`` puts off to the end of the batch."""
    sync, stages = schedule.options.get("sync"), range(schedule.stages)
    if sync != "eager_opt":
        return frozenset(stages if sync == "lazy" else ())
    last, played = _last_gradients(schedule), schedule.nominal
    return frozenset(
        stage
        for stage in stages
        if not all(_idle_after(played[rank], last.get((rank, stage), 0)) for rank in schedule.holders(stage))
    )


def _place_reductions_of_steps(played: list[list[Timed]], after: list[Slots]) -> None:
    """Without a flush every step is preceded by its own reduction; all holders of a stage step equally often."""
    for timed, slots in zip(played, after, strict=True):
        for index, (action, start, _) in enumerate(timed):
            if action.kind is Kind.STEP:
                slots[index].append((start, action._replace(kind=Kind.REDUCE)))


def _idle_after(timed: list[Timed], index: int) -> bool:
    """Whether a rank is idle at some time after its first ``index`` actions, or has nothing more to do."""
    rest = timed[max(0, index - 1) :]
    return index == len(timed) or any(later.start > earlier.end for earlier, later in pairwise(rest))
