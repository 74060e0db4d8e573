"""The transport over Gloo: messages through host memory, and through shared memory between processes of one host."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_pipe.transport.base import Lane, Transport
from lightning_pipe.transport.shared_memory.rendezvous import connect_local
from lightning_pipe.transport.topology import Topology
from lightning_pipe.transport.work import StagedReceive, Work


class GlooTransport(Transport):
    """Messages through host memory; tensors of a GPU are staged through pinned memory.

    All lanes of a pipeline share one process group and have a tag each: Gloo moves the bytes of a message only once
    its receiver has come, so a pending operation of one lane holds up no other.

    Args:
        topology: the place of every process of the default group.
        device: where messages live.
        timeout: the longest that an operation may take.
        local: whether processes of one host use shared memory instead, for messages.
    """

    def __init__(self, topology: Topology, device: torch.device, timeout: timedelta, *, local: bool = True) -> None:
        super().__init__(topology, dist.get_rank(), device, timeout)
        self._open()
        if local:
            with self.guarding("connect to the processes of this host"):
                # those that were not found stay with Gloo: other hosts, other containers
                gather = partial(self.all_gather_object, members=topology.everyone)
                self._local = connect_local(self.process, topology.everyone, timeout.total_seconds(), gather)

    @override
    def send(self, data: Tensor, peer: int, lane: Lane) -> Work:
        if not data.is_cpu:
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            host.copy_(data, non_blocking=True)
            # The bytes must be in host memory before Gloo sees them; only what computes them is waited for.
            torch.cuda.current_stream(data.device).synchronize()
            data = host
        return self._start_send(data, self.peers[peer], lane, lane.tag)

    @override
    def receive(self, data: Tensor, peer: int, lane: Lane) -> Work:
        if data.is_cpu:
            return self._start_receive(data, self.peers[peer], lane, lane.tag)
        # pinned, so that the copy to the device need not wait for the host
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        work = self._start_receive(host, self.peers[peer], lane, lane.tag)
        return StagedReceive(work, host, data)
