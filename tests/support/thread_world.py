"""The messages and collectives under way between the threads of one process."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.topology import Topology


@dataclass
class MessageEnd:
    """A send or a receive. It is done when the bytes have been copied from the one to the other."""

    payload: Any
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


@dataclass
class PendingCollective:
    """A collective that some members have joined: what the first one calls, and the contribution of each."""

    what: Hashable
    contributions: dict[int, Any] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None


class LaneQueues:
    """The sends of one lane without a receive yet, or its receives without a send; one of the two is empty."""

    def __init__(self) -> None:
        self.sends: deque[MessageEnd] = deque()
        self.receives: deque[MessageEnd] = deque()


class SharedWorld:
    """What the transports of all threads share."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.lock = threading.Lock()
        self.channels: defaultdict[Hashable, LaneQueues] = defaultdict(LaneQueues)
        self.collectives: dict[Hashable, PendingCollective] = {}
        self.pending: set[threading.Event] = set()
        self.failure: tuple[int, BaseException] | None = None

    def fail(self, process: int, error: BaseException) -> None:
        """Remember the first failure and wake all threads that wait."""
        with self.lock:
            if self.failure is None:
                self.failure = (process, error)
            pending, self.pending = self.pending, set()
        for event in pending:
            event.set()

    def post(self, key: Hashable, end: MessageEnd, *, sending: bool) -> None:
        """Match a send with the oldest receive of its lane, or the other way round, or let it wait for one."""
        with self.lock:
            channel = self.channels[key]
            mine, other = (channel.sends, channel.receives) if sending else (channel.receives, channel.sends)
            self.pending.add(end.done)
            if not other:
                mine.append(end)
                return
            match = other.popleft()
        source, target = (end, match) if sending else (match, end)
        if source.payload.numel() == target.payload.numel():
            copy_bytes(target.payload, source.payload)
        else:
            source.error = target.error = (
                f"{source.payload.numel()} bytes were sent, {target.payload.numel()} expected: the ranks disagree"
            )
        self.finish(source.done, target.done)

    def join_collective(
        self,
        key: Hashable,
        process: int,
        contribution: Any,
        members: int,
        combine: Callable[[Any], Any],
        what: Hashable = None,
    ) -> PendingCollective:
        """Join a collective; the last member that does combines the contributions of all.

        Raises:
            CommunicationError: a member before this one has called something else than ``what``.
        """
        with self.lock:
            collective = self.collectives.setdefault(key, PendingCollective(what))
            if collective.what != what:
                raise CommunicationError(f"{what} meets {collective.what}: the ranks disagree.")
            self.pending.add(collective.done)
            collective.contributions[process] = contribution
            if len(collective.contributions) < members:
                return collective
            del self.collectives[key]
        # outside of the lock: a large reduction holds up no message
        collective.result = combine(collective.contributions)
        collective.contributions = {}  # a member that has yet to wait holds the memory of none
        self.finish(collective.done)
        return collective

    def finish(self, *events: threading.Event) -> None:
        """Wake the threads that wait for an operation that is now done."""
        with self.lock:
            self.pending.difference_update(events)
        for event in events:
            event.set()


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy bytes as a network would: without autograd, version counters or the thread's inference mode."""
    if target.device.type == source.device.type == "cpu":
        if source.nbytes:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return
    with torch.no_grad():
        target.copy_(source)
