"""The transport over Gloo: messages through host memory, and through shared memory between processes of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipe.transport.base import DONE, Collective, IncomingParts, Lane, Message, Words, Work, check_message
from lightning_pipe.transport.message_layout import MessageLayout
from lightning_pipe.transport.objects import PackedObject, read
from lightning_pipe.transport.shared_memory.peer import SharedMemoryPeer
from lightning_pipe.transport.shared_memory.rendezvous import connect_local
from lightning_pipe.transport.topology import Topology
from lightning_pipe.transport.torch_distributed import TorchTransport, object_lane, object_tag
from lightning_pipe.transport.work import LocalReceive, StagedReceive

_GATHERS = (1 << 16) - 2
"""The tag of gathers in shared memory: above those of the lanes, below those of objects."""


class GlooTransport(TorchTransport):
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
        super().__init__(topology, device, timeout, backend="gloo")
        self._complete = False
        if local:
            with self.failing("connect to the processes of this host"):
                found, complete = connect_local(self.process, self.peers, timeout.total_seconds(), self._gather)
            # those that were not found stay with Gloo: other hosts, other containers
            self._local = {self.peers.index(process): peer for process, peer in found.items()}
            self._complete = complete

    @override
    def send(self, data: Tensor, peer: int, lane: Lane) -> Work:
        check_message(data)
        if not data.is_cpu:
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            host.copy_(data, non_blocking=True)
            # The bytes must be in host memory before Gloo sees them; only what computes them is waited for.
            torch.cuda.current_stream(data.device).synchronize()
            data = host
        return self._start_send(data, peer, lane, _lane_tag(lane))

    @override
    def receive(self, data: Tensor, peer: int, lane: Lane) -> Work:
        check_message(data)
        if data.is_cpu:
            return self._start_receive(data, peer, lane, _lane_tag(lane))
        # pinned, so that the copy to the device need not wait for the host
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        work = self._start_receive(host, peer, lane, _lane_tag(lane))
        return StagedReceive(work, host, data)

    @override
    def send_parts(
        self, layout: MessageLayout, control: Words, tensors: Sequence[Tensor | None], peer: int, lane: Lane
    ) -> Sequence[Work]:
        if not self._shares(peer):
            return super().send_parts(layout, control, tensors, peer, lane)
        self._hand_over(
            layout.size, lambda address: layout.write(address, control, tensors), peer, lane, _lane_tag(lane)
        )
        return ()

    @override
    def receive_parts(
        self, layout: MessageLayout, peer: int, lane: Lane, control: Callable[[], Words]
    ) -> IncomingParts:
        if not self._shares(peer):
            return super().receive_parts(layout, peer, lane, control)
        return self._expect(layout.size, layout.read, peer, lane, _lane_tag(lane))

    @override
    def send_object_to(self, obj: object, peers: Sequence[int], tag: int) -> Work:
        elsewhere = [peer for peer in peers if peer not in self._local]
        if len(elsewhere) < len(peers):
            packed = PackedObject(obj)
            for peer in set(peers).difference(elsewhere):
                self._hand_over(packed.size, packed.write, peer, object_lane(tag), object_tag(tag))
        return super().send_object_to(obj, elsewhere, tag) if elsewhere else DONE

    @override
    def receive_object(self, peer: int, tag: int) -> Any:
        if peer not in self._local:
            return super().receive_object(peer, tag)
        reader = partial(read, device=self.device)
        return self._expect(None, reader, peer, object_lane(tag), object_tag(tag)).wait()

    def _hand_over(self, size: int, write: Callable[[int], Any], peer: int, lane: Lane | str, tag: int) -> None:
        """Write a message of ``size`` bytes where a process of this host reads it."""
        try:
            self._local[peer].hand_over(size, write, tag)
        except OSError as error:
            raise self.failed(Message("send", size, self.names[peer], lane), error) from error

    def _expect(
        self, size: int | None, reader: Callable[[int], Any], peer: int, lane: Lane | str, tag: int
    ) -> LocalReceive:
        """Start to read such a message; ``None``: of any size."""
        operation, local = Message("receive", size, self.names[peer], lane), self._local[peer]
        try:
            return LocalReceive(self, operation, local, local.expect(size, reader, tag))
        except OSError as error:
            raise self.failed(operation, error) from error

    @override
    def _all_gather(self, data: Tensor, members: tuple[int, ...]) -> list[Tensor]:
        """Where all members share memory, the first one collects: Gloo's threads would take five times as long."""
        if not (self._complete and set(members) <= set(self.peers)):
            return super()._all_gather(data, members)
        operation = Collective("object gather", data.nbytes, members)
        root, *others = [self._local.get(self.peers.index(member)) for member in members]
        gathered = torch.empty(len(members), data.numel(), dtype=data.dtype)
        gathered[members.index(self.process)] = data
        try:
            if root is not None:
                root.send(data, _GATHERS)
                self._arrive(gathered.flatten(), root, operation)
            else:
                connections = [other for other in others if other is not None]
                for number, other in enumerate(connections, start=1):
                    self._arrive(gathered[number], other, operation)
                for other in connections:
                    other.send(gathered.flatten(), _GATHERS)
        except OSError as error:
            raise self.failed(operation, error) from error
        return list(gathered)

    def _arrive(self, data: Tensor, sender: SharedMemoryPeer, operation: Collective) -> None:
        """Wait for a part of a gather."""
        LocalReceive(self, operation, sender, sender.receive(data, _GATHERS)).wait()

    def _shares(self, peer: int) -> bool:
        """Whether a process maps the same memory, and messages can be written to it as they are."""
        return peer in self._local and self.device.type == "cpu"

    def _gather(self, obj: object) -> list[Any]:
        return self.all_gather_object(obj, self.everyone)


def _lane_tag(lane: Lane) -> int:
    return 2 * lane.pipe + (lane.direction == "backward")
