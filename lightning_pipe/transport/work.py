"""Sends, receives and collectives under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_pipe.errors import CommunicationError

if TYPE_CHECKING:
    from lightning_pipe.transport.base import Transport


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the operation is done. On a GPU the current stream waits, not the host.

        Raises:
            CommunicationError: a peer failed, left, or did not answer in time.
        """


class Several:
    """Several operations that count as one."""

    def __init__(self, *works: Work) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are done."""
        for work in self._works:
            work.wait()


DONE = Several()
"""An operation that had nothing to do."""


class Guarded:
    """A context around what may block: reports of a hang name it, and its errors become those of this package.

    Every message has one: a context made of a generator takes several times as long.
    """

    __slots__ = ("_operation", "_transport")

    def __init__(self, transport: Transport, operation: object) -> None:
        self._transport, self._operation = transport, operation

    def __enter__(self) -> None:
        self._transport.waiting = self._operation

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self._transport.waiting = None
        elif isinstance(error, RuntimeError | OSError) and not isinstance(error, CommunicationError):
            raise self._transport.error(self._operation, error) from error


class GroupWork:
    """An operation of a process group, or a receive from a process of this host, and what reports of a hang call it.

    Its tensors are held until it is done, and no longer.

    The process group's own work must be waited for once only: on Gloo a second wait lasts until the timeout.
    """

    def __init__(self, transport: Transport, operation: object, work: Any, held: Tensor | None) -> None:
        self._transport, self._operation = transport, operation
        self._work, self._held = work, held

    def wait(self) -> Any:
        """Return when the operation is done, with what it returns."""
        if self._work is None:
            return None
        with self._transport.guarding(self._operation):
            result = self._work.wait()
        # the memory is freed with its last reference, and a caller may keep this object for a whole batch
        self._work = self._held = None
        return result


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
