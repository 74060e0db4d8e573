"""The processes of one host: none outlives the first one, and nobody waits for one that has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_pipe.trainer import children
from lightning_pipe.trainer.children import CHILD, Children
from tests.trainer.test_launcher import clean_environment

PATIENT = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_GLANCE", 0.05)
    monkeypatch.setattr(children, "_NOTICING", 0.2)
    monkeypatch.setattr(children, "_AFTER_SUCCESS", 5.0)
    monkeypatch.setattr(Children, "failed", False)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process would have left."""
    codes: list[int] = []
    monkeypatch.setattr(children, "leave", codes.append)
    return codes


def started(*scripts: str) -> Children:
    return Children([subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for script in scripts])


def until(left: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not left and time.monotonic() < deadline:
        time.sleep(0.02)


def test_all_are_ended_those_that_are_stopped_or_deaf_too() -> None:
    family = started(PATIENT, DEAF)
    stopped, deaf = family._processes
    assert deaf.stdout is not None
    deaf.stdout.readline()
    stopped.send_signal(signal.SIGSTOP)
    family.end(0.0)
    assert [process.wait(10) for process in (stopped, deaf)] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "Process 2 of this host was killed by SIGKILL."),
        ("raise SystemExit(7)", "Process 2 of this host has ended with code 7."),
    ],
)
def test_all_end_when_one_fails(script: str, words: str, left: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    family = started(PATIENT, script)
    until(left)
    assert left == [1]
    assert capsys.readouterr().err == f"{words} All processes of this host end.\n"
    assert family._processes[0].wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 143])
def test_one_that_has_ended_well_ends_nobody(code: int, left: list[int]) -> None:
    family = started(PATIENT, f"raise SystemExit({code})")
    family._processes[1].wait()
    time.sleep(0.6)
    assert not left
    assert family._processes[0].poll() is None
    family.end(0.0)


def test_the_first_process_that_notices_is_left_to_end_by_itself(left: list[int]) -> None:
    family = started("raise SystemExit(1)")
    family._processes[0].wait()
    family.end(1.0)
    time.sleep(0.5)
    assert not left


def test_a_child_that_fails_after_the_run_makes_this_process_fail(
    left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    family = started("raise SystemExit(3)", "")
    family.close()
    assert left == [1]
    assert capsys.readouterr().err == "Process 1 of this host has ended with code 3.\n"


class Broken:
    """Output whose reader has gone."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    flush = close = write


def test_a_child_that_fails_after_the_run_makes_this_process_fail_though_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch, left: list[int]
) -> None:
    family = started("raise SystemExit(3)")
    with monkeypatch.context() as broken:
        broken.setattr(sys, "stderr", Broken())
        family.close()
    assert left == [1]


def test_all_end_though_nobody_reads_it(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "stderr", Broken())
        started("raise SystemExit(3)")
        until(left)
    assert left == [1]


ORPHAN = """
import time
from lightning_pipe.trainer.children import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(90)
"""
PARENT = f"""
import os, pathlib, subprocess, sys
environment = {{**os.environ, {CHILD!r}: str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {ORPHAN!r}], env=environment, stdout=subprocess.PIPE)
pathlib.Path(sys.argv[2]).write_text(str(child.pid))
if sys.argv[1] == "late":
    child.stdout.readline()
os.kill(os.getpid(), 9)
"""


def alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_child_ends_with_its_parent_even_if_that_has_gone_before(tmp_path: Path, when: str) -> None:
    # an early end: the child imports torch for seconds, and finds its parent gone
    subprocess.run([sys.executable, "-c", PARENT, when, tmp_path / "pid"], env=clean_environment(), timeout=60)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 40
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)


def test_a_copy_of_the_process_ends_nobody() -> None:
    family = started(PATIENT)
    if (copy := os.fork()) == 0:
        family.close()
        os._exit(0)
    os.waitpid(copy, 0)
    assert family._processes[0].poll() is None
    family.end(0.0)
