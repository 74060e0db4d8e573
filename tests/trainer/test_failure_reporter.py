"""One process tells why a run has failed: process 0, or in its place the one that failed first."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from lightning_pipe.trainer import failure_reporter
from lightning_pipe.transport.failures.board import FailureBoard
from lightning_pipe.transport.topology import Topology
from tests.support.threads import thread_world


@pytest.fixture
def boards() -> Iterator[list[FailureBoard]]:
    store = HashStore()
    made = [FailureBoard(store, transport, patience=0.2) for transport in thread_world(Topology(3))]
    yield made
    for board in made:
        board.close()


def test_process_0_tells_if_it_comes_to_it(boards: list[FailureBoard]) -> None:
    answers: dict[int, bool] = {}
    children = [
        threading.Thread(target=lambda number=number: answers.update({number: boards[number].becomes_reporter(10.0)}))
        for number in (1, 2)
    ]
    for child in children:
        child.start()
    time.sleep(0.2)
    answers[0] = boards[0].becomes_reporter()
    for child in children:
        child.join(10.0)
    assert answers == {0: True, 1: False, 2: False}


def test_one_of_the_others_tells_if_process_0_does_not(boards: list[FailureBoard]) -> None:
    assert [boards[process].becomes_reporter(0.1) for process in (2, 1, 0)] == [True, False, False]


@pytest.mark.parametrize(("failed", "reporter"), [(2, 2), (1, 1), (0, 1), (None, (0, 1, 2))])
def test_the_origin_tells_if_the_store_has_gone(
    boards: list[FailureBoard], failed: int | None, reporter: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> bool:
        raise RuntimeError("Connection reset by peer")

    if failed is not None:
        boards[failed].fail(ValueError("the reason"))
    for board in boards:
        board.find_failure()
        monkeypatch.setattr(board.store, "become_reporter", gone)
        monkeypatch.setattr(board.store, "has_reporter", gone)
    tells = [board.transport.process for board in boards if board.becomes_reporter(0.1)]
    assert tells == ([reporter] if isinstance(reporter, int) else [0, 1, 2])


def test_an_error_of_ones_own_keeps_what_failed_first(boards: list[FailureBoard]) -> None:
    reason = ValueError("the reason")
    boards[1].fail(reason)
    boards[0].find_failure()
    own = KeyError("another one")
    boards[0].completed(own)
    assert "ValueError: the reason" in own.__notes__[0]
    same = ValueError("the reason")
    boards[0].completed(same)
    assert not hasattr(same, "__notes__")
    quoting = RuntimeError(str(boards[0].explain("Something is wrong.")))
    boards[0].completed(quoting)
    assert not hasattr(quoting, "__notes__")


@pytest.mark.parametrize("told", [False, True])
def test_a_child_prints_nothing_if_another_one_tells(
    boards: list[FailureBoard], told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failure_reporter, "is_child", lambda: True)
    monkeypatch.setattr(failure_reporter, "_PATIENCE", 0.1)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    if told:
        assert boards[0].becomes_reporter()
    error = ValueError("the reason")
    failure_reporter.report_once(error, boards[1], started=False)
    sys.excepthook(ValueError, error, None)
    assert ("the reason" in capsys.readouterr().err) is not told
