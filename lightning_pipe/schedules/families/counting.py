"""Writes one rank's order, numbering the micro-batches of each kind and stage as they come."""

from __future__ import annotations

from collections import Counter

from lightning_pipe.schedules.action import Action, Kind

Order = list[Action]


class CountingOrder:
    """One rank's order; each kind of action takes a stage's micro-batches one after the other.

    Example:
        >>> order = CountingOrder()
        >>> order.add(Kind.FORWARD, stage=1, times=2)
        >>> order.add(Kind.BACKWARD, stage=1)
        >>> print(*order.actions)
        1F0 1F1 1B0
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: Counter[tuple[Kind, int]] = Counter()

    def add(self, kind: Kind, stage: int, times: int = 1) -> None:
        """Append an action on the next micro-batches."""
        for _ in range(times):
            self.actions.append(Action(kind, stage, self.counts[kind, stage]))
            self.counts[kind, stage] += 1
