"""The transport over NCCL: tensors go from GPU to GPU, objects and control words through the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_pipe.transport.base import Channel, Lane, Transport
from lightning_pipe.transport.topology import Topology
from lightning_pipe.transport.work import GroupWork, Work

# NCCL's own watchdog ends the process without a report; the failure board's thread must come before it.
_WATCHDOG_SLACK = timedelta(seconds=60)


class NcclTransport(Transport):
    """Messages between GPUs; one per process, one GPU each.

    NCCL ignores tags and runs all operations of a communicator in the order in which they were issued. So every
    channel (a lane from one rank to another) has a communicator of its own, with a stream of its own: a pending receive
    holds up neither a send to the same rank nor a message to another one. `connect` opens them, in the same order on
    all ranks: opening one waits for the other end, and opened on first use that wait could go round in a circle.

    Waiting for an operation makes the current stream wait, not the host. A peer that never answers is noticed where
    the host next waits for the GPU: by NCCL's watchdog, or before it by the failure board's thread.
    """

    def __init__(self, topology: Topology, device: torch.device, timeout: timedelta) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        super().__init__(topology, dist.get_rank(), device, timeout, backend="nccl")
        self.inline_control = False
        self._channels: dict[Channel, ProcessGroup] = {}
        self._known: set[Channel] = set()
        self._opened: set[tuple[int, ...]] = set()
        self._open()

    @override
    def new_group(self, processes: Sequence[int], backend: str = "gloo") -> ProcessGroup:
        slack = _WATCHDOG_SLACK if backend == "nccl" else timedelta()
        group: ProcessGroup = dist.new_group(sorted(processes), timeout=self.timeout + slack, backend=backend)
        return group

    @override
    def connect(self, channels: Iterable[Channel]) -> None:
        for channel in sorted(set(channels) - self._known):
            self._known.add(channel)
            pipelines = [(each, n) for each in self.topology.tensor_slices for n in range(self.topology.replicas)]
            for topology, replica in pipelines:
                members = topology.members(replica, (channel.rank, channel.peer))
                group = self.new_group(members, "nccl")
                if self.process in members:
                    self._channels[channel] = group
                    self._open_channel(group, channel)

    @override
    def open_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        # sorted: processes with several groups in common come to them in the same order
        for members in sorted(set(groups) - self._opened):
            self._opened.add(members)
            self._wait_on_host(self.all_reduce(torch.zeros(1, device=self.device), members))

    @override
    def send(self, data: Tensor, peer: int, lane: Lane) -> Work:
        operation = f"send {data.numel()} bytes to {self.describe(self.peers[peer])} on {lane}"
        group = self._channels[Channel(self.rank, peer, lane)]
        with self.guarding(operation):
            work = group.send([data], 1 - group.rank(), 0)
        return GroupWork(self, operation, work, data)

    @override
    def receive(self, data: Tensor, peer: int, lane: Lane) -> Work:
        operation = f"receive {data.numel()} bytes from {self.describe(self.peers[peer])} on {lane}"
        group = self._channels[Channel(peer, self.rank, lane)]
        with self.guarding(operation):
            work = group.recv([data], 1 - group.rank(), 0)
        return GroupWork(self, operation, work, data)

    @override
    def abort(self) -> None:
        super().abort()
        groups = [group for (_, backend), group in self._groups.items() if backend == "nccl"]
        for group in filter(None, (*self._channels.values(), *groups, *self._mesh_groups.values())):
            group.abort()

    @override
    def close(self) -> None:
        if dist.is_initialized():
            for group in self._channels.values():
                dist.destroy_process_group(group)
        self._channels.clear()
        super().close()

    def _open_channel(self, group: ProcessGroup, channel: Channel) -> None:
        """Make the communicator now, by one byte."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        source, target = (self.describe(self.peers[rank]) for rank in (channel.rank, channel.peer))
        operation = f"open {channel.lane} from {source} to {target}"
        start = group.send if self.rank == channel.rank else group.recv
        with self.guarding(operation):
            self._wait_on_host(GroupWork(self, operation, start([byte], 1 - group.rank(), 0), byte))

    def _wait_on_host(self, work: Work) -> None:
        """Wait for an operation as if the host had to read its result."""
        work.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
