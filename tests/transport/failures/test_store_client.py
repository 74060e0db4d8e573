"""A store that does not answer, or has gone, keeps nobody waiting."""

from __future__ import annotations

import socket
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.failures import joined_threads
from lightning_pipe.transport.failures.board import FailureBoard
from lightning_pipe.transport.failures.store_client import StoreClient, StoreGoneError, StoreSilentError
from lightning_pipe.transport.topology import Topology
from tests.support.threads import thread_world


class Frozen:
    """A store whose server stands still for a while."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def clone(self) -> Frozen:
        return self

    def add(self, key: str, amount: int) -> int:
        return 1  # the board is made before the server stands still

    def __getattr__(self, name: str) -> Any:
        def request(*_: Any) -> bool:
            self.goes_on.wait(20)
            return False

        return request


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    store = Frozen()
    client = StoreClient(store, patience=0.2)
    start = time.monotonic()
    for _ in range(3):  # once it is known to be silent the patience is smaller
        with pytest.raises(StoreSilentError):
            client.ask(lambda store: store.check(["x"]))
    assert time.monotonic() - start < 5
    store.goes_on.set()
    while client._late:
        time.sleep(0.01)
    assert client.ask(lambda store: store.check(["x"])) is False
    client.close()


def test_the_silence_of_process_0_is_the_message() -> None:
    store = Frozen()
    first, transport = thread_world(Topology(2), timedelta(seconds=1))
    board = FailureBoard(store, transport, patience=0.2)  # type: ignore[arg-type]
    board.store._client._patience = 0.2
    board.watch(interval=0.1, stall=0.5, exit_after=None)
    board.position = "F0"
    assert board.noticed.wait(0.3) is False  # a silent store alone is no fault
    deadline = time.monotonic() + 10
    while not board.overdue and time.monotonic() < deadline:
        time.sleep(0.05)
    error = board.explain("Rank 1 could not go on.")
    assert isinstance(error, CommunicationError)
    assert f"{first.describe().capitalize()} does not answer" in str(error)
    assert board.becomes_reporter()  # so whoever knows it prints it
    store.goes_on.set()
    board.close()


def test_a_store_that_has_gone_is_not_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=socket.dup(listener.fileno())
        )
    client = StoreClient(PrefixStore("run", TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)))
    client.ask(lambda store: store.set("x", "y"))
    assert client.ask(lambda store: store.get("x")) == b"y"
    del server
    with pytest.raises(StoreGoneError):
        client.ask(lambda store: store.get("x"))
    client.close()
    assert "frame" not in capfd.readouterr().err


@pytest.mark.parametrize("handled", [False, True])
def test_a_hook_that_hangs_after_a_failure_does_not_keep_the_process(
    handled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = threading.Event()
    monkeypatch.setattr(joined_threads, "leave", lambda code: left.set())
    store = HashStore()
    boards = [FailureBoard(store, transport, patience=0.1) for transport in thread_world(Topology(2))]
    boards[0].watch(interval=0.05, stall=0.5, exit_after=0.1)
    boards[1].fail(ValueError("the reason"))
    assert isinstance(boards[0].explain("Rank 0 could not go on."), CommunicationError)
    if handled:
        boards[0].fail(KeyError("a consequence"))
    assert left.wait(0.9 if handled else 10.0) is not handled
    assert ("ValueError: the reason" in capsys.readouterr().err) is not handled
    for board in boards:
        board.close()


def test_a_process_that_does_not_react_is_ended_though_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    left = threading.Event()
    monkeypatch.setattr(joined_threads, "leave", lambda code: left.set())
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=gone, flush=lambda: None))
    store = HashStore()
    boards = [FailureBoard(store, transport, patience=0.1) for transport in thread_world(Topology(2))]
    boards[0].watch(interval=0.05, stall=0.5, exit_after=0.1)
    boards[1].fail(ValueError("the reason"))
    assert left.wait(10.0)
    for board in boards:
        board.close()
