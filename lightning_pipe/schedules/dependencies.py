"""What an action waits for, and the times at which a schedule's actions run. Everything else is built on these two."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, NamedTuple

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind, Placement, blocks

if TYPE_CHECKING:
    from lightning_pipe.schedules.ir import Schedule

Number = int | float | Fraction
Occupied = Literal["neither", "sender", "receiver", "both"]
Links = Literal["free", "directed", "shared"]

FORWARD_DONE, GRADIENT_DONE = "forward", "gradient"
Result = tuple[str, int, int | None]
"""``(what, stage, micro_batch)``: a value that one action produces and others wait for."""


class Timed(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: Number
    end: Number


class Message(NamedTuple):
    """The result of an action on its way from a rank; ``start`` to ``end`` is when it occupies its link."""

    sender: int
    start: Number
    end: Number


def result_of(action: Action) -> Result | None:
    """The value other ranks or stages wait for: a stage's output, or the gradient of a stage's input."""
    if action.kind is Kind.FORWARD:
        return (FORWARD_DONE, action.stage, action.micro_batch)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return (GRADIENT_DONE, action.stage, action.micro_batch)
    return None


def remote_need(action: Action, stages: int) -> Result | None:
    """The value of a neighbouring stage that an action waits for; ``None`` if it needs none."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return (FORWARD_DONE, action.stage - 1, action.micro_batch)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage < stages - 1:
        return (GRADIENT_DONE, action.stage + 1, action.micro_batch)
    return None


def local_need(action: Action) -> Result | None:
    """The value of its own stage that an action waits for; the rank's order must already put it before."""
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.RECOMPUTE):
        return (FORWARD_DONE, action.stage, action.micro_batch)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (GRADIENT_DONE, action.stage, action.micro_batch)
    return None


def consumer_rank(action: Action, stages: int, placement: Placement) -> int | None:
    """The rank that waits for an action's result; ``None`` at the ends of the model."""
    if action.kind is Kind.FORWARD and action.stage < stages - 1:
        return placement[action.pipe, action.stage + 1]
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage > 0:
        return placement[action.pipe, action.stage - 1]
    return None


def in_one(order: Sequence[Action], *, overlaps: bool) -> list[tuple[Action, ...]]:
    """The actions of one rank, those together that run as one: they begin and end together.

    Joined forward passes do where both are recomputed; joined forward and backward passes where a device ``overlaps``
    them.
    """
    again = {action[1:4] for action in order if action.kind is Kind.RECOMPUTE}
    found: list[tuple[Action, ...]] = []
    for block in blocks(order):
        differ = len({action.kind for action in block}) > 1
        one = overlaps if differ else all(action[1:4] in again for action in block)
        found += [block] if one else [(action,) for action in block]
    return found


def play(
    schedule: Schedule,
    duration: Callable[[Action], Number] = lambda action: NOMINAL[action.kind],
    transfer: Callable[[Action], Number] = lambda action: 0,
    release: Callable[[Action], Number] = lambda action: 0,
    *,
    occupies: Occupied = "neither",
    links: Links = "free",
    overlap: Number | None = None,
) -> list[list[Timed]]:
    """Run every rank's actions in order, each as soon as its rank is free and what it needs has arrived.

    ::

        free -> [receive: the transfer if it occupies the receiver] -> [compute] -> finished
          ^                                                                            |
          +------------------- [send: link, the transfer if it occupies the sender] <--+

    A link is given to messages in the order in which their actions finish, which is why actions are taken in the order
    of their ends. Actions that run as one need all their inputs when they begin, and their results appear together at
    the end.

    Args:
        schedule: the schedule.
        duration: time of an action.
        transfer: time from the end of an action until its result is on another rank.
        release: time before which an action cannot start.
        occupies: who does nothing else during a message.
        links: which messages between two ranks travel one after the other.
        overlap: the share of their messages that joined forward and backward passes hide; ``None``: these run one after
            the other.

    Returns:
        For every rank its actions with start and end, in exactly the arithmetic of the times given.

    Raises:
        ScheduleError: the ranks wait for each other.
    """
    return _Player(schedule, duration, transfer, release, occupies, links, overlap).run()


@dataclass
class _Player:
    """Ranks at work, and what each of them waits for. Arguments as of `play`."""

    schedule: Schedule
    duration: Callable[[Action], Number]
    transfer: Callable[[Action], Number]
    release: Callable[[Action], Number]
    occupies: Occupied
    links: Links
    overlap: Number | None

    def __post_init__(self) -> None:
        orders = self.schedule.actions
        self.to_come = [deque(in_one(order, overlaps=self.overlap is not None)) for order in orders]
        self.running: list[tuple[Action, ...]] = [() for _ in orders]
        self.played: list[list[Timed]] = [[] for _ in orders]
        self.free: list[Number] = [0] * len(orders)
        self.sent: dict[Result, Message] = {}
        self.waiting: dict[Result, int] = {}
        self.taken: dict[tuple[int, int], Number] = {}  # until when each link is
        self.ends: list[tuple[Number, int]] = []

    def run(self) -> list[list[Timed]]:
        for rank in range(len(self.played)):
            self.begin(rank)
        while self.ends:
            end, rank = heappop(self.ends)
            self.finish(rank, end)
            self.begin(rank)
        if any(self.to_come):
            raise _stuck(self.schedule, self.played, self.waiting, self.overlap is not None)
        return self.played

    def begin(self, rank: int) -> None:
        """Let a free rank begin its next action, or wait for what it needs."""
        if not self.to_come[rank]:
            return
        block = self.to_come[rank][0]
        needs = [need for action in block if (need := remote_need(action, self.schedule.stages)) is not None]
        missing = next((need for need in needs if need not in self.sent), None)
        if missing is not None:
            self.waiting[missing] = rank
            return
        self.running[rank] = self.to_come[rank].popleft()
        start = max([self.free[rank], *map(self.release, block)])
        for message in (self.sent[need] for need in needs if self.sent[need].sender != rank):
            if self.occupies in ("receiver", "both"):
                start = max(start, message.start) + (message.end - message.start)
            else:
                start = max(start, message.end)
        for action in block:
            self.played[rank].append(Timed(action, start, start + self.duration(action)))
            start = self.played[rank][-1].end
        heappush(self.ends, (start, rank))

    def finish(self, rank: int, end: Number) -> None:
        """Send the results, and let the ranks that wait for them go on."""
        self.free[rank] = end
        for action in self.running[rank]:
            result = result_of(action)
            if result is None:
                continue
            receiver = consumer_rank(action, self.schedule.stages, self.schedule.placement)
            if receiver is None or receiver == rank:
                self.sent[result] = Message(rank, end, end)
            else:
                self.sent[result] = self.send(action, rank, receiver, self.free[rank])
            if result in self.waiting:
                self.begin(self.waiting.pop(result))

    def send(self, action: Action, rank: int, receiver: int, ready: Number) -> Message:
        """Give the message its link, and the sender time until it is free again."""
        start, time = ready, self.transfer(action)
        if self.overlap is not None and len({each.kind for each in self.running[rank]}) > 1:
            time *= 1 - self.overlap
        if self.links != "free":
            link = (rank, receiver) if self.links == "directed" else (min(rank, receiver), max(rank, receiver))
            start = max(ready, self.taken.get(link, ready))
            self.taken[link] = start + time
        self.free[rank] = start + time if self.occupies in ("sender", "both") else ready
        return Message(rank, start, start + time)


def held(orders: Iterable[Iterable[Action]]) -> list[int]:
    """For every rank the most stage-micro-batches whose activations it holds at once.

    An activation is held from the forward that computes it to the last backward action that reads it. Where an
    action recomputes it, it is held only from there: the forward kept no more than the stage's input.
    """
    peaks = []
    for order in orders:
        actions, alive, peak = list(order), set(), 0
        recomputed = {action[1:4] for action in actions if action.kind is Kind.RECOMPUTE}
        for action in actions:
            where = action[1:4]
            if action.kind is Kind.RECOMPUTE or (action.kind is Kind.FORWARD and where not in recomputed):
                alive.add(where)
                peak = max(peak, len(alive))
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                alive.discard(where)
        peaks.append(peak)
    return peaks


def steps_before_forwards(orders: Iterable[Iterable[Action]]) -> dict[tuple[int, int], int]:
    """``(stage, micro_batch)`` -> optimizer steps that the stage's rank has made before the forward pass."""
    seen: dict[tuple[int, int], int] = {}
    for order in orders:
        steps: Counter[int] = Counter()
        for action in order:
            if action.kind is Kind.STEP:
                steps[action.stage] += 1
            elif action.kind is Kind.FORWARD and action.micro_batch is not None:
                seen[action.stage, action.micro_batch] = steps[action.stage]
    return seen


def versions_after(schedule: Schedule, rank: int) -> dict[int, tuple[int, int]]:
    """The versions of a stage's weights that a rank holds, from the oldest still needed to the newest.

    Returns:
        ``index of an action -> (its stage, versions held once it has run)``, for steps and backward actions.
    """
    order = schedule.actions[rank]
    newest = Counter(action.stage for action in order if action.kind is Kind.STEP)
    if not newest:
        return {}
    oldest: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for index, (kind, stage, micro_batch, *_) in reversed(list(enumerate(order))):
        if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            found[index] = stage, newest[stage] - oldest.get(stage, newest[stage]) + 1
            version = schedule.versions.get((stage, micro_batch or 0), 0)
            oldest[stage] = min(version, oldest.get(stage, version))
        elif kind is Kind.STEP:
            found[index] = stage, newest[stage] - oldest.get(stage, newest[stage]) + 1
            newest[stage] -= 1
    return found


NOMINAL: dict[Kind, Number] = {
    Kind.FORWARD: 2,
    Kind.BACKWARD: 4,
    Kind.BACKWARD_INPUT: 2,
    Kind.BACKWARD_WEIGHT: 2,
    Kind.RECOMPUTE: 2,
    Kind.STEP: 1,
}
"""Durations where only their rough proportion matters: the order of messages, list scheduling, deadlock checks."""


def _stuck(schedule: Schedule, played: list[list[Timed]], waiting: dict[Result, int], overlap: bool) -> ScheduleError:
    waits = []
    for (what, stage, micro_batch), rank in sorted(waiting.items(), key=lambda each: each[1]):
        done = len(played[rank])
        action = schedule.actions[rank][done]
        pipe = next(each.pipe for order in schedule.actions for each in order if each.micro_batch == micro_batch)
        holder = schedule.placement[pipe, stage]
        waits.append(
            f"row {rank} cannot run {action} (action {done}): the {what} of micro-batch {micro_batch} "
            f"at stage {stage} has not been computed by row {holder}"
        )
    pairs = overlap and any(action.joined for order in schedule.actions for action in order)
    return ScheduleError(
        f"Schedule {schedule.name!r} deadlocks: " + "; ".join(waits) + ".",
        hint="Leave overlap out: with it, a pair of passes begins when the inputs of both are there."
        if pairs
        else "Order the actions so that every row's next action depends only on actions that can run before it.",
    )
