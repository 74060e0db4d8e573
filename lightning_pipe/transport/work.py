"""Sends, receives and collectives under way in the transports over torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.base import Work
from lightning_pipe.transport.shared_memory.peer import PostedReceive, SharedMemoryPeer

if TYPE_CHECKING:
    from lightning_pipe.transport.torch_distributed import TorchTransport


class Failing:
    """While the context lasts, errors of the process group and of sockets become those of this package.

    Every message has one: a context made of a generator takes several times as long.
    """

    __slots__ = ("_operation", "_transport")

    def __init__(self, transport: TorchTransport, operation: object) -> None:
        self._transport, self._operation = transport, operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError | OSError) and not isinstance(error, CommunicationError):
            raise self._transport.error(self._operation, error) from error


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
            self._complete(self._work)
            self._transport.waiting = None
        if self._error is not None:
            raise self._error

    def _complete(self, work: dist.Work) -> None:
        """Wait, keep an error, and release the tensors."""
        try:
            work.wait()
        except RuntimeError as error:
            self._error = self._transport.error(self._operation, error)
            self._error.__cause__ = error
        # the memory is freed with its last reference, and a caller may keep this object for a whole batch
        self._work = self._held = None


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

    def wait(self) -> None:
        """Wait for the message."""
        if self._posted.done:
            return
        self._transport.waiting = self._operation
        with self._transport.failing(self._operation):
            self._peer.wait(self._posted)
        self._transport.waiting = None
