"""Sends, receives and collectives under way in the transports over torch.distributed."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.base import Work
from lightning_pipe.transport.failures import joined_threads
from lightning_pipe.transport.shared_memory.peer import PostedReceive, SharedMemoryPeer

if TYPE_CHECKING:
    from lightning_pipe.transport.torch_distributed import TorchTransport


WATCHED_SIZE = 1 << 18
"""From this size on a thread watches over a send or a sum for others over Gloo, so that its buffer is freed as soon as
it is done: Gloo cannot be asked whether an operation is done (its `is_completed` is False until `wait` returns, torch
2.13)."""


class GroupWork:
    """An operation of a process group. Its tensors are held until it is done, and no longer.

    The process group's own work must be waited for once only: on Gloo a second wait lasts until the timeout.
    """

    def __init__(self, transport: TorchTransport, operation: object, work: dist.Work, held: Tensor | None) -> None:
        self._transport = transport
        self._operation = operation
        self._work: dist.Work | None = work
        self._held = held
        self._error: CommunicationError | None = None

    def wait(self) -> None:
        """Return when the operation is done."""
        if self._work is not None:
            self._transport.waiting = self._operation
            self.complete()
            self._transport.waiting = None
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """Wait, keep an error for `wait` to raise, and release the tensors."""
        work = self._work
        assert work is not None
        try:
            limit = self._transport.limit
            # with a limit NCCL's `wait` would make the host wait for the GPU
            if limit is None or self._held is None or not self._held.is_cpu:
                work.wait()
            else:
                work.wait(limit)
        except RuntimeError as error:
            self._error = self._transport.failed(self._operation, error)
            self._error.__cause__ = error
        # the memory is freed with its last reference, and a caller may keep this object for a whole batch
        self._work = self._held = None


class WatchedWork(GroupWork):
    """An operation that a `Watcher` waits for."""

    def __init__(self, transport: TorchTransport, operation: object, work: dist.Work, held: Tensor | None) -> None:
        super().__init__(transport, operation, work, held)
        self._done = threading.Event()

    @override
    def wait(self) -> None:
        if not self._done.is_set():
            self._transport.waiting = self._operation
            self._done.wait()
            self._transport.waiting = None
        if self._error is not None:
            raise self._error

    @override
    def complete(self) -> None:
        super().complete()
        self._done.set()


class StagedReceive:
    """A receive into pinned host memory, copied to the device when it has arrived."""

    def __init__(self, work: Work, host: Tensor, target: Tensor) -> None:
        self._work = work
        self._staging: tuple[Tensor, Tensor] | None = (host, target)

    def wait(self) -> None:
        """Wait for the message and start to copy it; the current stream waits for the copy."""
        self._work.wait()
        if self._staging is not None:
            host, target = self._staging
            # The caching host allocator keeps the pinned memory until the copy is done.
            with torch.no_grad():
                target.copy_(host, non_blocking=True)
            self._staging = None


class LocalReceive:
    """A receive from a process of this host."""

    def __init__(
        self, transport: TorchTransport, operation: object, peer: SharedMemoryPeer, posted: PostedReceive
    ) -> None:
        self._transport = transport
        self._operation = operation
        self._peer = peer
        self._posted = posted

    def wait(self) -> Any:
        """Wait for the message; returns what its reader made of it."""
        if self._posted.done:
            return self._posted.result
        self._transport.waiting = self._operation
        try:
            self._peer.wait(self._posted)
        except OSError as error:
            raise self._transport.failed(self._operation, error) from error
        self._transport.waiting = None
        return self._posted.result


class Watcher:
    """A thread that waits for operations in the order in which it gets them."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[WatchedWork | None] = queue.SimpleQueue()
        self._thread = joined_threads.start(name, self._run, self.stop)

    def watch(self, work: WatchedWork) -> None:
        """Complete the operation after those before it."""
        self._queue.put(work)

    def stop(self) -> None:
        """Let the thread end after the operations that it has."""
        self._queue.put(None)

    def close(self) -> None:
        """Wait until it has ended."""
        self.stop()
        self._thread.join(joined_threads.PATIENCE)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.complete()
