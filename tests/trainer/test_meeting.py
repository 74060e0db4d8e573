"""What all processes must do together, and one of them does alone, is an error within seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lightning_pipe.errors import CollectiveError, CommunicationError
from lightning_pipe.trainer import meeting
from lightning_pipe.trainer.meeting import Meetings
from lightning_pipe.transport import failures
from lightning_pipe.transport.failures import FailureBoard
from lightning_pipe.transport.topology import Topology
from tests.support.threads import thread_world

Act = Callable[[Meetings, FailureBoard], None]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SETTLED", 0.3)
    monkeypatch.setattr(failures, "SETTLED", 0.3)


def together(*acts: Act, gone: bool = False) -> list[BaseException | None]:
    """What each process's thread raises."""
    store, world = HashStore(), thread_world(Topology(len(acts)), timeout=timedelta(seconds=20))
    errors: list[BaseException | None] = [None] * len(acts)
    boards = [FailureBoard(store, transport, patience=0.2) for transport in world]

    def run(process: int) -> None:
        boards[process].watch(interval=0.04, exit_after=30.0)
        try:
            acts[process](Meetings(boards[process], lambda: gone), boards[process])
        except Exception as error:
            errors[process] = error
            boards[process].fail(error)

    threads = [threading.Thread(target=run, args=(process,)) for process in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for board in boards:
        board.close()
    return errors


def calls(*names: str) -> Act:
    def act(meetings: Meetings, board: FailureBoard) -> None:
        for name in names:
            meetings.come(name)

    return act


def waits(meetings: Meetings, board: FailureBoard) -> None:
    """As in a receive."""
    board.transport.waiting = "receive 272 bytes from rank 0"
    while board.failure is None:
        time.sleep(0.01)
    raise CommunicationError("closed by peer")


def computes(meetings: Meetings, board: FailureBoard) -> None:
    time.sleep(1.0)
    meetings.come("save")


def test_all_come() -> None:
    assert together(*[calls("save", "barrier", "save")] * 3) == [None] * 3


def test_different_things() -> None:
    errors = together(calls("save"), calls("barrier"), calls("barrier"))
    found = [str(error) for error in errors if isinstance(error, CollectiveError)]
    assert found
    assert all(" is called on rank " in text for text in found)
    assert all(errors)


@pytest.mark.parametrize("others", [1, 2])
def test_one_comes_and_the_others_wait_for_it(others: int) -> None:
    errors = together(calls("save"), *[waits] * others)
    assert isinstance(errors[0], CollectiveError)
    assert "Save is called on rank 0, and not on all others: rank 1 waits to receive 272 bytes" in str(errors[0])


def test_one_that_computes_is_waited_for() -> None:
    assert together(calls("save"), calls("save"), computes) == [None] * 3


def test_one_that_moves_on_is_waited_for() -> None:
    def moves(meetings: Meetings, board: FailureBoard) -> None:
        for number in range(10):
            board.transport.waiting = f"receive {number}"
            time.sleep(0.1)
        meetings.come("save")

    assert together(calls("save"), moves) == [None] * 2


def test_one_that_has_ended_is_not_waited_for() -> None:
    errors = together(calls("save"), lambda meetings, board: None, gone=True)
    assert "after another process has ended" in str(errors[0])


def test_a_failure_of_another_process_is_quoted() -> None:
    def fails(meetings: Meetings, board: FailureBoard) -> None:
        raise ValueError("the reason")

    errors = together(calls("the end of the run"), fails)
    assert isinstance(errors[0], CommunicationError)
    assert "ValueError: the reason" in str(errors[0])
