"""The processes of one host: none outlives the first one, and nobody waits for one that has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_pipe.errors import CommunicationError
from lightning_pipe.trainer import children
from lightning_pipe.trainer.children import CHILD, Children
from lightning_pipe.transport.failures import joined_threads
from tests.trainer.test_launcher import clean_environment

PATIENT = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(children, "_PATIENCE", 1.0)
    monkeypatch.setattr(children, "_GLANCE", 0.05)
    joined_threads.forget_failures()
    yield
    joined_threads._forced.clear()


def started(*scripts: str) -> Children:
    return Children(
        [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for script in scripts], first=4
    )


class Board:
    """Stands for the failure board."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.noticed = threading.Event()

    def await_failure(self, patience: float) -> None:
        return None

    def lost(self, process: int, text: str) -> None:
        self.told.append((process, text))


def test_all_are_ended_those_that_are_stopped_or_deaf_too() -> None:
    family = started(PATIENT, DEAF)
    stopped, deaf = family._processes
    assert deaf.stdout is not None
    deaf.stdout.readline()
    stopped.send_signal(signal.SIGSTOP)
    family.end(patience=0.0)
    assert stopped.poll() == -signal.SIGTERM  # it was let go on, to take it
    assert deaf.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory?)"),
        ("raise SystemExit(7)", "has ended with code 7"),
    ],
)
def test_the_end_of_a_child_is_told_to_the_board(script: str, words: str) -> None:
    family = started(PATIENT, script)
    family.board = board = Board()  # type: ignore[assignment]
    deadline = time.monotonic() + 20
    with family.running():
        while not board.told and time.monotonic() < deadline:
            time.sleep(0.02)
    family.end(patience=0.0)
    assert board.told == [(6, f"{words} (PID {family._processes[1].pid})")]


def test_a_child_that_has_ended_well_is_told_about_if_it_is_missed() -> None:
    family = started("")
    family.board = board = Board()  # type: ignore[assignment]
    family._processes[0].wait()
    with family.running():
        time.sleep(0.3)
        assert not board.told
        board.noticed.set()
        deadline = time.monotonic() + 20
        while not board.told and time.monotonic() < deadline:
            time.sleep(0.02)
    assert [process for process, _ in board.told] == [5]


def test_nobody_waits_for_one_that_has_gone_before_all_are_connected() -> None:
    family = started("raise SystemExit(0)")

    def connect() -> None:
        with family.running():
            while True:
                family.check()
                time.sleep(0.02)

    with pytest.raises(CommunicationError, match=r"Process 5 has ended with code 0 \(PID \d+\), before all"):
        connect()


def test_an_error_before_all_are_connected_ends_the_children() -> None:
    family = started(PATIENT)
    with pytest.raises(ValueError, match="bug"), family.running():
        raise ValueError("bug")
    assert family._processes[0].poll() == -signal.SIGTERM


def test_a_child_that_fails_after_the_run_makes_this_process_fail(capsys: pytest.CaptureFixture[str]) -> None:
    family = started("raise SystemExit(3)", "")
    family.close()
    assert joined_threads._forced == [1]
    assert capsys.readouterr().err == "Process 5 has ended with code 3.\n"


class Broken:
    """Output whose reader has gone."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    flush = close = write


def test_a_child_that_fails_after_the_run_makes_this_process_fail_though_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = started("raise SystemExit(3)")
    with monkeypatch.context() as broken:
        broken.setattr(sys, "stderr", Broken())
        family.close()
    assert joined_threads._forced == [1]


def test_a_child_lost_before_all_are_connected_ends_this_process_though_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = threading.Event()
    monkeypatch.setattr(joined_threads, "leave", lambda code: left.set())
    with monkeypatch.context() as broken:
        broken.setattr(sys, "stderr", Broken())
        family = started("raise SystemExit(3)")
        with family.running():
            assert left.wait(20.0)
    family.end(patience=0.0)


def test_a_child_ends_with_its_parent_though_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    codes: list[int] = []
    monkeypatch.setenv(CHILD, str(gone.pid))
    monkeypatch.setattr(children, "_watching", [])
    monkeypatch.setattr(joined_threads, "leave", codes.append)
    monkeypatch.setattr(joined_threads, "start", lambda *_: threading.current_thread())
    with monkeypatch.context() as broken:
        broken.setattr(sys, "stderr", Broken())
        children.end_with_parent()
    assert codes == [1]


ORPHAN = "from lightning_pipe.trainer.children import end_with_parent; end_with_parent(); import time; time.sleep(60)"
PARENT = f"""
import os, subprocess, sys
environment = {{**os.environ, {CHILD!r}: str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {ORPHAN!r}], env=environment)
if sys.argv[1] == "late":
    import time; time.sleep(60)
os.kill(os.getpid(), 9)
"""


def test_a_child_ends_with_its_parent_even_if_that_has_gone_before(tmp_path: Any) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        # the child imports torch for seconds, and finds its parent gone
        subprocess.run([sys.executable, "-c", PARENT, "early"], stderr=file, env=clean_environment(), check=False)
    deadline = time.monotonic() + 60
    while "ends: process 0" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "which has started it, has gone" in log.read_text()


def test_a_copy_of_the_process_ends_nobody() -> None:
    family = started(PATIENT)
    if (copy := os.fork()) == 0:
        family.close()
        os._exit(0)
    os.waitpid(copy, 0)
    assert family._processes[0].poll() is None
    family.end(patience=0.0)
