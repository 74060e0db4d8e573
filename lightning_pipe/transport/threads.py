"""A transport between the threads of one process: engine sweeps and property tests need no processes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.base import (
    DONE,
    Collective,
    Lane,
    Message,
    Reduction,
    Transport,
    Work,
    check_message,
)
from lightning_pipe.transport.thread_world import Half, Meeting, SharedWorld, copy_bytes
from lightning_pipe.transport.topology import Topology

T = TypeVar("T")

_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class _MemoryWork:
    """An operation that another thread completes."""

    def __init__(self, transport: ThreadTransport, operation: object, half: Half | Meeting) -> None:
        self._transport = transport
        self._operation = operation
        self._half = half

    def wait(self) -> None:
        """Return when the other side has come."""
        self._transport.block(self._half.done, self._operation)
        error = getattr(self._half, "error", None)
        if error is not None:
            raise self._transport.error(self._operation, CommunicationError(error))


class ThreadTransport(Transport):
    """Messages between threads, with the semantics of the real transports; see `thread_world`."""

    def __init__(self, world: SharedWorld, process: int, timeout: timedelta, device: torch.device) -> None:
        super().__init__(world.topology, process, device, timeout)
        self.world = world
        self._groups: set[tuple[int, ...]] = {tuple(range(world.topology.world_size))}
        self._calls: defaultdict[tuple[int, ...], int] = defaultdict(int)

    @override
    def send(self, data: Tensor, peer: int, lane: Lane) -> Work:
        check_message(data)
        return self._post("send", data, (self.process, self.peers[peer], lane), peer, lane)

    @override
    def receive(self, data: Tensor, peer: int, lane: Lane) -> Work:
        check_message(data)
        return self._post("receive", data, (self.peers[peer], self.process, lane), peer, lane)

    @override
    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        self._groups.update(tuple(group) for group in groups)

    @override
    def all_reduce(self, tensor: Tensor, members: tuple[int, ...], op: Reduction = "sum") -> Work:
        def conclude(brought: dict[int, Tensor]) -> None:
            with torch.no_grad():
                total = brought[members[0]].clone()
                for member in members[1:]:
                    total = _REDUCE[op](total, brought[member])
            for target in brought.values():
                copy_bytes(target, total)

        return self._meet("all-reduce", tensor, tensor.nbytes, members, conclude)

    @override
    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        def conclude(brought: dict[int, Tensor]) -> None:
            for member, target in brought.items():
                if member != source:
                    copy_bytes(target, brought[source])

        return self._meet("broadcast", tensor, tensor.nbytes, members, conclude)

    @override
    def barrier(self, members: tuple[int, ...] | None = None) -> None:
        members = tuple(range(self.topology.world_size)) if members is None else members
        self._attend("barrier", None, 0, members, lambda brought: None)

    @override
    def abort(self) -> None:
        self.world.fail(self.process, CommunicationError(f"{self.describe().capitalize()} gave up."))

    @override
    def close(self) -> None:
        self.waiting = None

    def block(self, event: threading.Event, operation: object) -> None:
        """Wait for an event; raise if a thread has failed or the time is up."""
        self.waiting = operation
        # A failure has woken those who waited by then; who comes after it must not begin to.
        in_time = self.world.failure is not None or event.wait(self.timeout.total_seconds())
        failure = self.world.failure
        if failure is not None:
            process, cause = failure
            raise CommunicationError(
                f"{self.describe().capitalize()} could not {operation}: {self.describe(process)} failed with "
                f"{type(cause).__name__}: {cause}"
            )
        if not in_time:
            raise self.error(operation, None, timed_out=True)
        self.waiting = None

    @override
    def _send_bytes(self, data: Tensor, peer: int, tag: int) -> Work:
        ends = (self.process, self.peers[peer])
        return self._post("send", data, (*ends, tag), peer, f"the object lane with tag {tag}")

    @override
    def _receive_bytes(self, data: Tensor, peer: int, tag: int) -> Work:
        ends = (self.peers[peer], self.process)
        return self._post("receive", data, (*ends, tag), peer, f"the object lane with tag {tag}")

    @override
    def _all_gather(self, data: Tensor, members: tuple[int, ...]) -> list[Tensor]:
        def conclude(brought: dict[int, Tensor]) -> list[Tensor]:
            return [brought[member] for member in members]

        tensors: list[Tensor] = self._attend("object gather", data, data.nbytes, members, conclude).result
        return tensors

    def _post(self, verb: Any, data: Tensor, key: Hashable, peer: int, lane: Lane | str) -> _MemoryWork:
        half = Half(data)
        operation = Message(verb, data.numel(), self.names[peer], lane)
        self.world.post(key, half, sending=verb == "send")
        return _MemoryWork(self, operation, half)

    def _meet(
        self, name: str, brought: Any, size: int, members: tuple[int, ...], conclude: Callable[[Any], Any]
    ) -> Work:
        self.check_members(members)
        if len(members) == 1:
            return DONE
        if members not in self._groups:
            raise CommunicationError(f"The group {members} was never made.", hint="Call make_groups on all processes.")
        if isinstance(brought, Tensor) and not brought.is_contiguous():
            raise CommunicationError(f"A {name} needs a contiguous tensor, not strides {brought.stride()}.")
        self._calls[members] += 1
        key = (members, self._calls[members])
        meeting = self.world.meet(key, self.process, brought, len(members), conclude)
        return _MemoryWork(self, Collective(name, size, members), meeting)

    def _attend(
        self, name: str, brought: Any, size: int, members: tuple[int, ...], conclude: Callable[[Any], Any]
    ) -> Meeting:
        work = self._meet(name, brought, size, members, conclude)
        if not isinstance(work, _MemoryWork):
            return Meeting(result=conclude({self.process: brought}))
        work.wait()
        meeting = work._half
        assert isinstance(meeting, Meeting)
        return meeting


def thread_world(
    topology: Topology, timeout: timedelta = timedelta(seconds=30), device: torch.device | None = None
) -> list[ThreadTransport]:
    """One transport per process of the topology, for threads of this process.

    Args:
        topology: the place of every process.
        timeout: the longest that a blocking call waits.
        device: where messages live; the CPU by default.

    Returns:
        The transports, indexed by process. Give each to one thread, or all to `run_threads`.
    """
    world = SharedWorld(topology)
    device = torch.device("cpu") if device is None else device
    return [ThreadTransport(world, process, timeout, device) for process in range(topology.world_size)]


def run_threads(
    world: Sequence[ThreadTransport], fn: Callable[[ThreadTransport], T], timeout: float | timedelta = 60.0
) -> list[T]:
    """Run ``fn(transport)`` in one thread per process and return the results, indexed by process.

    Args:
        world: the transports of a `thread_world`.
        fn: what every process does.
        timeout: seconds after which all of it must be done.

    Raises:
        BaseException: the first failing thread's own error; the others stop with `CommunicationError`.
        CommunicationError: not all threads were done in time; the message says where each of them was.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    results: dict[int, T] = {}

    def body(transport: ThreadTransport) -> None:
        try:
            results[transport.process] = fn(transport)
        except BaseException as error:
            transport.world.fail(transport.process, error)

    threads = [
        threading.Thread(target=body, args=(transport,), daemon=True, name=f"process {transport.process}")
        for transport in world
    ]
    for thread in threads:
        thread.start()
    shared = world[0].world
    deadline = time.monotonic() + seconds
    while any(thread.is_alive() for thread in threads) and shared.failure is None and time.monotonic() < deadline:
        next(thread for thread in threads if thread.is_alive() or thread is threads[-1]).join(0.02)
    if shared.failure is None and any(thread.is_alive() for thread in threads):
        late = [transport for transport, thread in zip(world, threads, strict=True) if thread.is_alive()]
        error = CommunicationError(f"Not done within {seconds:g} s.\n" + "\n".join(map(_where, late)))
        shared.fail(late[0].process, error)
    if shared.failure is not None:
        # One that is still computing would disturb what runs next: threads share torch's random generator.
        deadline = time.monotonic() + 5.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise shared.failure[1]
    return [results[transport.process] for transport in world]


def _where(transport: ThreadTransport) -> str:
    place = f"waits to {transport.waiting}" if transport.waiting is not None else "computes"
    position = "" if transport.board is None else f" at {transport.board.position}"
    return f"  {transport.describe()}{position}: {place}"
