"""A transport between the threads of one process: sweeps of the engine and tests of properties need no processes."""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.base import Lane, Reduction, Transport
from lightning_pipe.transport.topology import Topology
from lightning_pipe.transport.work import DONE, Several, Work
from tests.support.thread_world import MessageEnd, PendingCollective, SharedWorld, copy_bytes

T = TypeVar("T")

_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class _ThreadWork:
    """An operation that another thread completes."""

    def __init__(self, transport: ThreadTransport, operation: object, pending: MessageEnd | PendingCollective) -> None:
        self._transport = transport
        self._operation = operation
        self._pending = pending

    def wait(self) -> Any:
        """Return when the other threads have come, with the result of a collective."""
        self._transport.block(self._pending.done, self._operation)
        if isinstance(self._pending, PendingCollective):
            return self._pending.result
        if self._pending.error is not None:
            raise self._transport.error(self._operation, CommunicationError(self._pending.error))
        return None


class ThreadTransport(Transport):
    """Messages between threads, with the semantics of the real transports; see `thread_world`."""

    def __init__(self, world: SharedWorld, process: int, timeout: timedelta, device: torch.device) -> None:
        super().__init__(world.topology, process, device, timeout)
        self.world = world
        self.shares_generators = world.topology.world_size > 1
        topology = world.topology
        of_pipelines = (topology.members(each, range(topology.ranks)) for each in range(topology.replicas))
        self._known: set[tuple[int, ...]] = {topology.everyone, *of_pipelines}
        self._calls: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.sent = 0  # the bytes of messages whose size both ends had agreed on

    @override
    def send(self, data: Tensor, peer: int, lane: Lane) -> Work:
        self.sent += data.numel()
        return self._post("send", data, (self.process, self.peers[peer], lane), self.peers[peer], lane)

    @override
    def receive(self, data: Tensor, peer: int, lane: Lane) -> Work:
        return self._post("receive", data, (self.peers[peer], self.process, lane), self.peers[peer], lane)

    @override
    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        self._known.update(tuple(group) for group in groups)

    @override
    def all_reduce(self, tensor: Tensor, members: tuple[int, ...], op: Reduction = "sum") -> Work:
        def combine(contributions: dict[int, Tensor]) -> None:
            total = _reduced(contributions, members, op)
            for target in contributions.values():
                copy_bytes(target, total)

        return DONE if len(members) == 1 else self._join("all-reduce", tensor, members, combine)

    @override
    def reduce_scatter(self, parts: Sequence[Tensor], members: tuple[int, ...]) -> Work:
        def combine(contributions: dict[int, Tensor], member: int) -> None:
            copy_bytes(contributions[member], _reduced(contributions, members, "sum"))

        if len(members) == 1:
            return DONE
        each = zip(parts, members, strict=True)
        works = [self._join("reduce", part, members, partial(combine, member=member), member) for part, member in each]
        return Several(*works)

    @override
    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        def combine(contributions: dict[int, Tensor]) -> None:
            for member, target in contributions.items():
                if member != source:
                    copy_bytes(target, contributions[source])

        return DONE if len(members) == 1 else self._join("broadcast", tensor, members, combine, source)

    @override
    def barrier(self) -> None:
        if self.topology.world_size > 1:
            self._join("barrier", None, self.topology.everyone, lambda contributions: None).wait()

    @override
    def abort(self) -> None:
        self.world.fail(self.process, CommunicationError(f"{self.describe().capitalize()} gave up."))

    @override
    def close(self) -> None:
        self.waiting = None

    def block(self, event: threading.Event, operation: object) -> None:
        """Wait for an event; raise if a thread has failed or the time is up."""
        self.waiting = operation
        # A failure has woken the threads that waited by then; a thread that comes later must not begin to wait.
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
    def _start_send(self, data: Tensor, process: int, lane: Lane | str, tag: int) -> Work:
        return self._post("send", data, (self.process, process, tag), process, lane)

    @override
    def _start_receive(self, data: Tensor, process: int, lane: Lane | str, tag: int) -> Work:
        return self._post("receive", data, (process, self.process, tag), process, lane)

    def _post(self, verb: Any, data: Tensor, key: Hashable, process: int, lane: Lane | str) -> _ThreadWork:
        assert data.dtype is torch.uint8, data.dtype
        assert data.dim() == 1 and data.is_contiguous(), data.shape  # noqa: PT018
        end = MessageEnd(data)
        preposition = "to" if verb == "send" else "from"
        operation = f"{verb} {data.numel()} bytes {preposition} {self.describe(process)} on {lane}"
        self.world.post(key, end, sending=verb == "send")
        return _ThreadWork(self, operation, end)

    def _join(
        self,
        name: str,
        data: Tensor | None,
        members: tuple[int, ...],
        combine: Callable[[dict[int, Any]], Any],
        root: int | None = None,
    ) -> _ThreadWork:
        """Join a collective of several members with a tensor; ``root`` has or gets the values, if one of them does."""
        assert list(members) == sorted({*members}), members
        assert self.process in members, members
        if members not in self._known:
            raise CommunicationError(f"The group {members} was never made.", hint="Call make_groups on all processes.")
        if data is not None and not data.is_contiguous():
            raise CommunicationError(f"A {name} needs a contiguous tensor, not strides {data.stride()}.")
        # members call their collectives in the same order, so equal counts mean the same call
        self._calls[members] += 1
        key = (members, self._calls[members])
        size = "" if data is None else f" of {data.nbytes} bytes"
        operation = f"finish {name}{size} with ranks {list(members)}"
        # other bytes than the caller's would be written, or beyond its memory
        what = f"{operation}{'' if data is None else f' in {data.dtype}'}{'' if root is None else f', root {root}'}"
        collective = self.world.join_collective(key, self.process, data, len(members), combine, what)
        return _ThreadWork(self, operation, collective)


@torch.no_grad()
def _reduced(contributions: dict[int, Tensor], members: tuple[int, ...], op: Reduction) -> Tensor:
    """In the order of the members: the result depends on no thread's speed."""
    total = contributions[members[0]].clone()
    for member in members[1:]:
        total = _REDUCE[op](total, contributions[member])
    return total


class Draws(nn.Module):
    """Masks by what it is given, as dropout does by chance: ranks that are threads have one generator."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``, times numbers between 0 and 1."""
        generator = torch.Generator().manual_seed(int(1e6 * x.detach().abs().sum()))
        return x * torch.rand(x.shape, generator=generator).to(x)


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
    shared = world[0].world
    deadline = time.monotonic() + seconds
    with _no_collection():
        for thread in threads:
            thread.start()
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """While the context lasts, no garbage is collected by itself.

    torch holds a generator's mutex while it makes the tensor of its state. If that collects garbage, another thread may
    get the interpreter; one that then waits for the mutex keeps it for ever (torch 2.13). torch's own code does so, in
    reentrant activation checkpoints.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _where(transport: ThreadTransport) -> str:
    place = f"waits to {transport.waiting}" if transport.waiting is not None else "computes"
    position = "" if transport.board is None else f" at {transport.board.position}"
    return f"  {transport.describe()}{position}: {place}"
