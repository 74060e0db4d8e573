"""The actions and messages of all ranks in the order of time."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_pipe.schedules.action import Action
from lightning_pipe.schedules.dependencies import Number, Result, Timed, consumer_rank, play, remote_need, result_of
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.simulate.costs import Costs


class Message(NamedTuple):
    """A result on its way to another rank.

    ``start`` to ``end`` is when it occupies its link; ``taken`` is when the action that needs it starts.
    """

    action: Action
    sender: int
    receiver: int
    start: Number
    end: Number
    taken: Number


class Run(NamedTuple):
    """For every rank its actions with start and end, and the messages between ranks in the order of their arrival."""

    played: list[list[Timed]]
    messages: list[Message]


def run(schedule: Schedule, costs: Costs) -> Run:
    """Run every rank's actions in order under costs whose messages may occupy ranks and links.

    Without them (``occupies="neither"``, ``links="free"``, no ``overhead``) the times are those of
    `lightning_pipe.schedules.dependencies.play`.

    Raises:
        ScheduleError: the ranks wait for each other.
    """
    return _Run(schedule, costs).run()


_FINISHED, _FREE = 0, 1


class _Run:
    """A queue of moments: a rank has finished an action, or is free for its next one.

    ::

        free -> [receive: overhead, the transfer if it occupies the receiver] -> [compute] -> finished
          ^                                                                                      |
          +---------------- [send: overhead, link, the transfer if it occupies the sender] <-----+

    A link is given to messages in the order in which their actions finish, which is why moments are taken in the
    order of time.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.sending = costs.occupies in ("sender", "both")
        self.receiving = costs.occupies in ("receiver", "both")
        self.played: list[list[Timed]] = [[] for _ in schedule.actions]
        self.messages: list[Message] = []
        self.done: dict[Result, tuple[int, Number, Number]] = {}  # rank, start and end of the transfer
        self.waiting: dict[Result, int] = {}
        self.links: dict[Hashable, Number] = {}
        self.moments: list[tuple[Number, int, int]] = [(0, _FREE, rank) for rank in range(schedule.ranks)]

    def run(self) -> Run:
        while self.moments:
            now, what, rank = heappop(self.moments)
            if what == _FREE:
                self._begin(rank, now)
            else:
                self._finish(rank, now)
        if any(len(timed) < len(queue) for timed, queue in zip(self.played, self.schedule.actions, strict=True)):
            play(self.schedule)  # says who waits for whom
        return Run(self.played, self.messages)

    def _begin(self, rank: int, now: Number) -> None:
        if len(self.played[rank]) == len(self.schedule.actions[rank]):
            return
        action = self.schedule.actions[rank][len(self.played[rank])]
        need = remote_need(action, self.schedule.stages)
        start = now
        if need is not None:
            if need not in self.done:
                self.waiting[need] = rank
                return
            sender, sent, arrived = self.done[need]
            if sender != rank:
                start = max(now, sent) + (arrived - sent) if self.receiving else max(now, arrived)
                start += self.costs.overhead
                self._note(need, action, sender, rank, start)
        end = start + self.costs.duration(action) + self.costs.overhead
        self.played[rank].append(Timed(action, start, end))
        heappush(self.moments, (end, _FINISHED, rank))

    def _note(self, need: Result, action: Action, sender: int, receiver: int, taken: Number) -> None:
        _, sent, arrived = self.done[need]
        self.messages.append(Message(action._replace(stage=need[1]), sender, receiver, sent, arrived, taken))

    def _finish(self, rank: int, now: Number) -> None:
        action = self.played[rank][-1].action
        free = now
        result = result_of(action)
        if result is not None:
            receiver = consumer_rank(action, self.schedule.stages, self.schedule.placement)
            sent = arrived = now
            if receiver is not None and receiver != rank:
                free, sent, arrived = self._send(rank, receiver, now, self.costs.transfer(action))
            self.done[result] = rank, sent, arrived
            if result in self.waiting:
                heappush(self.moments, (now, _FREE, self.waiting.pop(result)))
        heappush(self.moments, (free, _FREE, rank))

    def _send(self, rank: int, receiver: int, now: Number, time: Number) -> tuple[Number, Number, Number]:
        """When the sender is free again, and when the transfer starts and ends."""
        ready = now + self.costs.overhead
        if self.costs.links == "free":
            sent = ready
        else:
            link = (rank, receiver) if self.costs.links == "directed" else (min(rank, receiver), max(rank, receiver))
            sent = max(ready, self.links.get(link, ready))
            self.links[link] = sent + time
        return (sent + time if self.sending else ready), sent, sent + time
