"""What the threads of an in-memory world share: messages and collectives that wait for their other ends."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.transport.topology import Topology


@dataclass
class Half:
    """One end of a message, waiting for the other one."""

    payload: Any
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


@dataclass
class Meeting:
    """The members of a collective that have come so far, with what each brought."""

    brought: dict[int, Any] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None


class Queue:
    """The sends and receives of one lane that have not met yet; never both."""

    def __init__(self) -> None:
        self.sends: deque[Half] = deque()
        self.receives: deque[Half] = deque()


class SharedWorld:
    """What the threads share."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.lock = threading.Lock()
        self.channels: defaultdict[Hashable, Queue] = defaultdict(Queue)
        self.meetings: dict[Hashable, Meeting] = {}
        self.pending: set[threading.Event] = set()
        self.failure: tuple[int, BaseException] | None = None

    def fail(self, process: int, error: BaseException) -> None:
        """Remember the first failure and wake all who wait."""
        with self.lock:
            if self.failure is None:
                self.failure = (process, error)
            pending, self.pending = self.pending, set()
        for event in pending:
            event.set()

    def post(self, key: Hashable, half: Half, *, sending: bool) -> None:
        """Match the half with the oldest one of the other side, or let it wait."""
        with self.lock:
            channel = self.channels[key]
            mine, other = (channel.sends, channel.receives) if sending else (channel.receives, channel.sends)
            self.pending.add(half.done)
            if not other:
                mine.append(half)
                return
            match = other.popleft()
        source, target = (half, match) if sending else (match, half)
        if source.payload.numel() == target.payload.numel():
            copy_bytes(target.payload, source.payload)
        else:
            source.error = target.error = (
                f"{source.payload.numel()} bytes were sent, {target.payload.numel()} expected: the ranks disagree"
            )
        self.finish(source.done, target.done)

    def meet(self, key: Hashable, process: int, brought: Any, members: int, conclude: Callable[[Any], Any]) -> Meeting:
        """Bring something to a meeting; who comes last concludes it."""
        with self.lock:
            meeting = self.meetings.setdefault(key, Meeting())
            self.pending.add(meeting.done)
            meeting.brought[process] = brought
            if len(meeting.brought) < members:
                return meeting
            del self.meetings[key]
        meeting.result = conclude(meeting.brought)
        self.finish(meeting.done)
        return meeting

    def finish(self, *events: threading.Event) -> None:
        """Wake those who wait for an operation that is now done."""
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
