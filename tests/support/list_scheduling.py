"""List scheduling: an order for any placement and any number of micro-batches, found by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from lightning_pipe.schedules.action import Action, Kind, Placement
from lightning_pipe.schedules.dependencies import NOMINAL, Number, consumer_rank


def list_schedule(
    forwards: Sequence[Sequence[Action]],
    stages: int,
    *,
    limits: Sequence[int] | None = None,
) -> list[list[Action]]:
    """Order actions by what can run first: a rank that is free takes a ready backward, else a ready forward.

    Args:
        forwards: for every rank its forward actions, the preferred ones first. They define the placement.
        stages: number of stages.
        limits: for every rank how many stage-micro-batches it holds at most; exceeded only where nothing could go
            on otherwise.

    Returns:
        For every rank its actions in an order that cannot deadlock.

    Example:
        >>> from lightning_pipe.schedules import Action, Kind
        >>> forwards = [[Action(Kind.FORWARD, stage, index) for index in range(2)] for stage in (0, 1)]
        >>> for order in list_schedule(forwards, stages=2, limits=[2, 1]):
        ...     print(*order)
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    return _ListScheduler(forwards, stages, limits).run()


class _ListScheduler:
    def __init__(self, forwards: Sequence[Sequence[Action]], stages: int, limits: Sequence[int] | None) -> None:
        self.stages = stages
        self.limits = limits or [len(actions) for actions in forwards]
        self.placement: Placement = {
            (action.pipe, action.stage): rank for rank, actions in enumerate(forwards) for action in actions
        }
        self.preference = {action: index for actions in forwards for index, action in enumerate(actions)}
        self.orders: list[list[Action]] = [[] for _ in forwards]
        self.held = [0] * len(forwards)
        self.ready: list[dict[Kind, list[tuple[tuple[int, ...], Action]]]] = [
            {Kind.BACKWARD: [], Kind.FORWARD: []} for _ in forwards
        ]
        self.running: list[tuple[Number, int, Action]] = []
        self.idle = set(range(len(forwards)))
        for action in self.preference:
            if action.stage == 0:
                self._make_ready(action)

    def run(self) -> list[list[Action]]:
        now: Number = 0
        while True:
            for rank in sorted(self.idle):
                self._start(rank, now)
            if not self.running and not self._exceed_a_limit(now):
                return self.orders
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                _, rank, action = heappop(self.running)
                self.idle.add(rank)
                self._finish(action)

    def _start(self, rank: int, now: Number, limit: int | None = None) -> bool:
        limit = self.limits[rank] if limit is None else limit
        for kind, queue in self.ready[rank].items():
            if queue and (kind is Kind.BACKWARD or self.held[rank] < limit):
                _, action = heappop(queue)
                self.held[rank] += 1 if kind is Kind.FORWARD else -1
                self.orders[rank].append(action)
                self.idle.remove(rank)
                heappush(self.running, (now + NOMINAL[kind], rank, action))
                return True
        return False

    def _exceed_a_limit(self, now: Number) -> bool:
        """Every rank waits for another: let the one nearest to its limit that has a ready forward run it."""
        return any(
            self._start(rank, now, limit=self.held[rank] + 1)
            for rank in sorted(self.idle, key=lambda rank: (self.held[rank] - self.limits[rank], rank))
        )

    def _finish(self, action: Action) -> None:
        kind, last = action.kind, action.stage == self.stages - 1
        if kind is Kind.FORWARD and last:
            self._make_ready(action._replace(kind=Kind.BACKWARD))
        elif consumer_rank(action, self.stages, self.placement) is not None:
            self._make_ready(action._replace(stage=action.stage + (1 if kind is Kind.FORWARD else -1)))

    def _make_ready(self, action: Action) -> None:
        forward = action.kind is Kind.FORWARD
        key = (self.preference[action],) if forward else (action.micro_batch or 0, -action.stage)
        rank = self.placement[action.pipe, action.stage]
        heappush(self.ready[rank][action.kind], (key, action))
