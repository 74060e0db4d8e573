"""What all transports over torch.distributed share: objects, collectives and groups, by Gloo on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Store  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.transport.base import (
    DONE,
    Collective,
    Lane,
    Message,
    Reduction,
    Several,
    Transport,
    Work,
)
from lightning_pipe.transport.shared_memory.peer import SharedMemoryPeer
from lightning_pipe.transport.topology import Topology
from lightning_pipe.transport.work import Failing, GroupWork, LocalReceive

_OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
# Tags below are lanes, tags from here on objects.
_FIRST_OBJECT_TAG = 1 << 16
_ABORT_TAG = _FIRST_OBJECT_TAG - 1


class TorchTransport(Transport):
    """What all transports over torch.distributed share: objects, host-side collectives and groups, all over Gloo.

    A transport needs an initialised default process group and makes groups of its own, so that no collective of the
    user or of Lightning in the default group can come between. Creating a transport is a collective.

    Args:
        topology: the place of every process of the default group.
        device: where messages live.
        timeout: the longest that an operation may take.
        backend: the backend of the groups for tensors.
    """

    def __init__(self, topology: Topology, device: torch.device, timeout: timedelta, backend: str) -> None:
        if dist.get_world_size() != topology.world_size:
            raise ConfigurationError(
                f"{topology.ranks} ranks x {topology.replicas} replicas x {topology.tensor} need "
                f"{topology.world_size} processes; "
                f"{dist.get_world_size()} have come up.",
                hint="Choose devices and num_nodes so that they multiply to that number.",
            )
        super().__init__(topology, dist.get_rank(), device, timeout)
        self._backend = backend
        self._host_groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._device_groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._mesh_groups: list[ProcessGroup] = []
        self._made: set[tuple[int, ...]] = set()
        self._make_group(topology.everyone)
        self._local: dict[int, SharedMemoryPeer] = {}
        self.make_groups([topology.same_tensor_rank])
        for replica in range(topology.replicas):
            self.make_groups([tuple(sorted(topology.pipeline_processes(replica)))])
        for first in range(0, topology.world_size, topology.tensor):
            self._make_group(topology.tensor_processes(first))
        # each group of Gloo has a thread that wakes a hundred times a second: messages share that of collectives
        self._messages = self._host_groups.get(topology.everyone)
        self._described = tuple(map(topology.describe, topology.everyone))

    @override
    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        topology = self.topology
        for group in groups:
            for number in range(topology.tensor):  # the other tensor ranks ask for theirs at the same time
                self._make_group(tuple(member - topology.tensor_rank + number for member in group))

    def mesh_group(self, lines: Sequence[Sequence[int]]) -> ProcessGroup:
        """A group for collectives of torch's own along a dimension of a mesh of devices. Collective over the world.

        Args:
            lines: the processes that differ in this dimension alone; this process is in one of them.
        """
        found = [self.new_group(line, self._backend) for line in lines]
        own = next(group for group, line in zip(found, lines, strict=True) if self.process in line)
        self._mesh_groups.append(own)
        return own

    @override
    def all_reduce(self, tensor: Tensor, members: tuple[int, ...], op: Reduction = "sum") -> Work:
        return self._collective("all-reduce", tensor, members, partial(dist.all_reduce, op=_OPS[op]))

    @override
    def reduce_scatter(self, parts: Sequence[Tensor], members: tuple[int, ...]) -> Work:
        # torch's reduce_scatter does the same over NCCL where parts have different sizes, and sums all of it everywhere
        # over Gloo (torch 2.13)
        return Several(
            *(
                self._collective("reduce", part, members, partial(dist.reduce, dst=member))
                for part, member in zip(parts, members, strict=True)
                if part.numel()
            )
        )

    @override
    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        return self._collective("broadcast", tensor, members, partial(dist.broadcast, src=source))

    def _collective(self, name: str, tensor: Tensor, members: tuple[int, ...], start: Callable[..., Any]) -> Work:
        group = self._group(members, host=tensor.device.type == "cpu")
        if group is None:
            return DONE
        operation = Collective(name, tensor.nbytes, members)
        with self.failing(operation):
            work = start(tensor, group=group, async_op=True)
        return GroupWork(self, operation, work, tensor)

    @override
    def barrier(self, members: tuple[int, ...] | None = None) -> None:
        self.all_reduce(torch.zeros(1), self.topology.everyone if members is None else members).wait()

    @override
    def abort(self) -> None:
        for peer in self._local.values():
            peer.shutdown()
        for group in (*self._host_groups.values(), *(self._mesh_groups if self._backend == "gloo" else ())):
            _abort_gloo(group)
        # Others may be on their way into a collective of the default group, where nobody will meet them any more.
        if dist.is_initialized() and dist.get_backend() == "gloo" and dist.group.WORLD is not None:
            _abort_gloo(dist.group.WORLD)

    @override
    def close(self) -> None:
        for peer in self._local.values():
            peer.close()
        self._local.clear()
        groups = (*self._host_groups.values(), *self._device_groups.values(), *self._mesh_groups)
        if dist.is_initialized():
            for group in {id(group): group for group in groups}.values():
                dist.destroy_process_group(group)
        # a group that is referred to keeps its connections and the store
        self._messages = None
        self._host_groups.clear()
        self._device_groups.clear()
        self._mesh_groups.clear()

    def new_group(self, processes: Sequence[int], backend: str = "gloo") -> ProcessGroup:
        """A process group of its own, with this transport's timeout. Collective over the world."""
        self.waiting = f"make a group of processes {list(processes)}"
        # Without a timeout torch would take its default of half an hour, not that of the default group.
        group: ProcessGroup = dist.new_group(sorted(processes), timeout=self.timeout, backend=backend)
        self.waiting = None
        return group

    def failing(self, operation: object) -> Failing:
        """Turns the process group's errors into those of this package."""
        return Failing(self, operation)

    @override
    @contextmanager
    def guarding(self, operation: object) -> Iterator[None]:
        self.waiting = operation
        with self.failing(operation):
            yield
        self.waiting = None

    def _make_group(self, members: tuple[int, ...]) -> None:
        if len(members) == 1 or members in self._made:
            return
        self._made.add(members)
        host = self.new_group(members)
        device = host if self._backend == "gloo" else self.new_group(members, self._backend)
        if self.process in members:
            self._host_groups[members] = host
            self._device_groups[members] = device

    def _group(self, members: tuple[int, ...], *, host: bool) -> ProcessGroup | None:
        """The group of these members; ``None`` if there is nobody else in it."""
        if len(members) == 1:
            return None
        return (self._host_groups if host else self._device_groups)[members]

    @override
    def _copies(self, process: int) -> bool:
        return process in self._local

    @override
    def _send_bytes(self, data: Tensor, process: int, tag: int) -> Work:
        return self._start_send(data, process, _object_lane(tag), _object_tag(tag))

    @override
    def _receive_bytes(self, data: Tensor, process: int, tag: int) -> Work:
        return self._start_receive(data, process, _object_lane(tag), _object_tag(tag))

    def _start_send(self, data: Tensor, process: int, lane: Lane | str, tag: int) -> Work:
        operation = Message("send", data.numel(), self._described[process], lane)
        local = self._local.get(process)
        with self.failing(operation):
            if local is not None:
                local.send(data, tag)
                return DONE
            assert self._messages is not None
            # What torch's isend calls, without its checks: they are half of the cost of a small message.
            work = self._messages.send([data], process, tag)
        return GroupWork(self, operation, work, data)

    def _start_receive(self, data: Tensor, process: int, lane: Lane | str, tag: int) -> Work:
        operation = Message("receive", data.numel(), self._described[process], lane)
        local = self._local.get(process)
        with self.failing(operation):
            if local is not None:
                return LocalReceive(self, operation, local, local.receive(data, tag))
            assert self._messages is not None
            work = self._messages.recv([data], process, tag)
        return GroupWork(self, operation, work, data)


def default_store() -> Store:
    """The store over which the processes have found each other."""
    # torch has no public way to it (2.13); Lightning and torch's own pipelining use the same function.
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _object_lane(tag: int) -> str:
    """How messages name the lane of objects with a tag."""
    return f"the object lane with tag {tag}"


def _object_tag(tag: int) -> int:
    """The tag of objects with a tag among those of all messages."""
    return _FIRST_OBJECT_TAG + tag


def _abort_gloo(group: ProcessGroup) -> None:
    """Make all pending operations of a Gloo group fail, here and at the peers.

    Gloo's own abort leaves pending operations alone (torch 2.13). A wait that times out closes the connections.
    """
    if group.size() == 1:
        return
    try:
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass
