"""Asks the store over which the processes have found each other, and does not wait for it for ever."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_pipe.transport.failures import joined_threads

T = TypeVar("T")


class StoreSilentError(RuntimeError):
    """The store does not answer: the process that serves it, or its host, stands still."""


class StoreGoneError(RuntimeError):
    """The store has gone with the process that served it."""


class StoreClient:
    """Asks a store.

    Process 0 serves the store. Stopped, or on a frozen host, it keeps its clients waiting for ever (torch 2.13), so a
    thread asks, and whoever wants an answer waits for the thread no longer than ``patience``.

    Args:
        store: used by nobody else.
        patience: seconds after which the store is silent.
    """

    def __init__(self, store: Store, patience: float = 5.0) -> None:
        self._store = store
        self._patience = patience
        self._server = _connection(store)
        self._requests: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._late = False
        self._thread = joined_threads.start("store", self._run, self.stop)

    def stop(self) -> None:
        """Let the thread end after the requests that it has."""
        self._requests.put(None)

    def close(self) -> None:
        """End the thread, and the connections."""
        self.stop()
        self._thread.join(joined_threads.PATIENCE)
        if self._server is not None:
            self._server.close()

    def ask(self, request: Callable[[Store], T]) -> T:
        """The store's answer.

        Raises:
            StoreSilentError: it does not come in time.
            StoreGoneError: the process that serves the store has gone.
        """
        if self._server is not None and _has_ended(self._server):
            raise StoreGoneError("its connections are closed")
        answer: Future[T] = Future()
        self._requests.put((request, answer))
        try:
            with suppress(TimeoutError):
                return answer.result(self._patience / (20 if self._late else 1))
        except RuntimeError as error:
            raise StoreGoneError(str(error).split("\n", 1)[0]) from None
        self._late = True
        raise StoreSilentError(f"no answer within {self._patience:g} s")

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            request, answer = item
            try:
                answer.set_result(request(self._store))
            except BaseException as error:
                answer.set_exception(error)
            self._late = False


def _connection(store: Store) -> socket.socket | None:
    """A connection over which nothing is said: it ends with the store.

    torch prints twenty lines of C++ frames for every request that a store does not answer any more (torch 2.13), so
    a store that has gone must not be asked.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    with suppress(OSError):
        connection = socket.create_connection((store.host, store.port), timeout=5.0)
        connection.setblocking(False)
        return connection
    return None


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
