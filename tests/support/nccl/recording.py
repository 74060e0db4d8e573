"""Runs the real NCCL transport over threads: what it asks of torch.distributed is noted and done between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_pipe.errors import CommunicationError
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.transport import base, nccl
from lightning_pipe.transport.base import Reduction
from lightning_pipe.transport.nccl import NcclTransport
from lightning_pipe.transport.topology import Topology
from lightning_pipe.transport.work import Work
from tests.support.nccl.events import Computed, Event, Group, Issued, Made, Read, Waited
from tests.support.rendezvous_sends import content
from tests.support.thread_world import MessageEnd, PendingCollective, copy_bytes
from tests.support.threads import ThreadTransport, run_threads, thread_world

_LIMIT = timedelta(seconds=20)
_COMPUTES = {Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


def record(topology: Topology, fn: Callable[[RecordingTransport], Any]) -> list[list[Event]]:
    """What every process issues while ``fn(transport)`` runs on all of them, connections included."""
    events: list[list[Event]] = [[] for _ in range(topology.world_size)]
    recorded_into(events, topology, fn)
    return events


def recorded_into(events: list[list[Event]], topology: Topology, fn: Callable[[RecordingTransport], Any]) -> None:
    """As `record`, into lists that keep what was issued before a failure."""
    fake = _Distributed(events)

    def body(threads: ThreadTransport) -> None:
        board = _Board(events[threads.process])
        with fake.process(threads, board):
            fn(RecordingTransport(topology, threads, events[threads.process], board))

    with ExitStack() as replaced:
        for module in (base, nccl):
            replaced.enter_context(mock.patch.object(module, "dist", fake))
        run_threads(thread_world(topology, _LIMIT), body, timeout=60)


class RecordingTransport(NcclTransport):
    """The transport over NCCL, on the CPU: what would be in a GPU's memory is told by what it is for."""

    shares_generators = True

    def __init__(self, topology: Topology, threads: ThreadTransport, events: list[Event], board: _Board) -> None:
        self._threads, self._events = threads, events
        self._on_host = False
        super().__init__(topology, torch.device("cpu"), _LIMIT)
        self.board = board  # type: ignore[assignment]

    @override
    def all_reduce(self, tensor: Tensor, members: tuple[int, ...], op: Reduction = "sum") -> Work:
        # masks of gradients and flags of stops are integers on the host
        with self._place(on_host=self._on_host or not tensor.is_floating_point()):
            return super().all_reduce(tensor, members, op)

    @override
    def barrier(self) -> None:
        with self._place(on_host=True):
            super().barrier()

    @override
    def send_object_to(self, processes: Sequence[int], obj: object, tag: int, *, kept: bool = False) -> Work:
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(obj)):
            self._events.append(Read())
        return super().send_object_to(processes, obj, tag, kept=kept)

    @override
    def abort(self) -> None:
        self._threads.abort()

    @override
    def _wait_on_host(self, work: Work) -> None:
        super()._wait_on_host(work)
        self._events.append(Read())

    @override
    def _group(self, members: tuple[int, ...], *, host: bool) -> Any:
        return super()._group(members, host=self._on_host)

    @contextmanager
    def _place(self, *, on_host: bool) -> Iterator[None]:
        before, self._on_host = self._on_host, on_host
        try:
            yield
        finally:
            self._on_host = before


class _Board:
    """In the place of the failure board: hears which action is under way."""

    overdue, limit = False, 0.0

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._action: Action | None = None

    @property
    def position(self) -> Action | None:
        return self._action

    @position.setter
    def position(self, action: Action | None) -> None:
        if self._action is not None and self._action.kind in _COMPUTES:
            self._events.append(Computed(str(self._action)))
        self._action = action

    def explain(self, message: str, *, timed_out: bool = False) -> CommunicationError:
        return CommunicationError(message)


class _Distributed:
    """In the place of torch.distributed in the modules of the transport."""

    def __init__(self, events: list[list[Event]]) -> None:
        self.events = events
        self._here = threading.local()

    @contextmanager
    def process(self, threads: ThreadTransport, board: _Board) -> Iterator[None]:
        """Be this process in the current thread."""
        self._here.threads, self._here.board, self._here.groups = threads, board, 0
        yield

    def get_rank(self) -> int:
        return int(self._here.threads.process)

    def get_world_size(self) -> int:
        return len(self.events)

    def is_initialized(self) -> bool:
        return False

    def new_group(self, processes: Sequence[int], timeout: timedelta, backend: str) -> _Group:
        self._here.groups += 1
        group = Group(self._here.groups, tuple(processes), backend)
        self.events[self.get_rank()].append(Made(group))
        return _Group(group, self._here.threads, self.events[self.get_rank()], self._here.board)

    def all_reduce(self, tensor: Tensor, op: Any, group: _Group, async_op: bool) -> _Work:
        def combine(tensors: dict[int, Tensor]) -> None:
            stacked = torch.stack([tensors[member] for member in sorted(tensors)])
            total = {ReduceOp.SUM: stacked.sum, ReduceOp.MAX: stacked.amax, ReduceOp.MIN: stacked.amin}[op](0)
            for target in tensors.values():
                copy_bytes(target, total.to(target.dtype))

        return group.join("all-reduce", tensor, combine)

    def reduce(self, tensor: Tensor, dst: int, group: _Group, async_op: bool) -> _Work:
        def combine(tensors: dict[int, Tensor]) -> None:
            copy_bytes(tensors[dst], torch.stack([tensors[member] for member in sorted(tensors)]).sum(0))

        return group.join(f"reduce for {dst}", tensor, combine)

    def broadcast(self, tensor: Tensor, src: int, group: _Group, async_op: bool) -> _Work:
        def combine(tensors: dict[int, Tensor]) -> None:
            for member, target in tensors.items():
                if member != src:
                    copy_bytes(target, tensors[src])

        return group.join("broadcast", tensor, combine)


class _Group:
    """A process group over the thread world."""

    def __init__(self, group: Group, threads: ThreadTransport, events: list[Event], board: _Board) -> None:
        self.group, self._threads, self._events, self._board = group, threads, events, board
        self._joined = 0

    def rank(self) -> int:
        return self.group.members.index(self._threads.process)

    def size(self) -> int:
        return len(self.group.members)

    def send(self, data: list[Tensor], rank: int, tag: int) -> _Work:
        peer = self.group.members[rank]
        return self._post("send", data[0], peer, (self.group, self._threads.process, peer, tag), tag)

    def recv(self, data: list[Tensor], rank: int, tag: int) -> _Work:
        peer = self.group.members[rank]
        return self._post("receive", data[0], peer, (self.group, peer, self._threads.process, tag), tag)

    def join(self, name: str, data: Tensor, combine: Callable[[Any], Any]) -> _Work:
        self._joined += 1
        number = self._issued(name, data.nbytes)
        pending = self._threads.world.join_collective(
            (self.group, self._joined),
            self._threads.process,
            data,
            self.size(),
            combine,
            f"{name} of {data.nbytes} bytes with ranks {list(self.group.members)}",
        )
        return _Work(number, self._threads, self._events, pending)

    def _post(self, verb: str, data: Tensor, peer: int, key: tuple[Any, ...], tag: int) -> _Work:
        number = self._issued(verb, data.nbytes, peer, tag)
        end = MessageEnd(data)
        self._threads.world.post(key, end, sending=verb == "send")
        return _Work(number, self._threads, self._events, end)

    def _issued(self, verb: str, size: int, peer: int | None = None, tag: int = 0) -> int:
        number = len(self._events)
        action = self._board.position
        message = peer is not None and self.group.backend == "nccl" and action is not None
        self._events.append(Issued(number, self.group, verb, size, peer, tag, content(action) if message else None))
        return number


class _Work:
    """An operation of a group under way."""

    def __init__(
        self, number: int, threads: ThreadTransport, events: list[Event], pending: MessageEnd | PendingCollective
    ) -> None:
        self._number, self._threads, self._events, self._pending = number, threads, events, pending

    def wait(self, limit: timedelta | None = None) -> None:
        self._events.append(Waited(self._number))  # before the wait: one that never ends is recorded as well
        self._threads.block(self._pending.done, f"finish operation {self._number}")
        assert not isinstance(self._pending, MessageEnd) or self._pending.error is None, self._pending.error
