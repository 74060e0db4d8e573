"""Runs whose processes are killed or told to end: all end, with words and a code, and none is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.process_groups import process_group
from tests.trainer.test_launcher import clean_environment

SCRIPT = """
import ctypes, os, signal, sys
from datetime import timedelta
import lightning as L
from lightning_pipe import PipeStrategy
from lightning_pipe.trainer import world
from tests.support.lit_modules import Data, Lit
from tests.support.trainer_runs import QUIET

fault, place, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
mine = rank == int(os.environ.get("LOCAL_RANK", 0))

def here(now):
    global mine
    if not mine or now != place:
        return
    mine = False
    if fault == "raise":
        raise ValueError("a bug")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts behind "&" ignore it
        os.kill(os.getpid(), signal.SIGINT)
    if fault == "lock":
        ctypes.PyDLL(None).sleep(25)

def at(name):
    function = getattr(world, name)
    def wrapper(*arguments, **options):
        here(name)
        return function(*arguments, **options)
    setattr(world, name, wrapper)

class Faulty(Lit):
    def configure_callbacks(self):
        here("callbacks")
        return []

    def on_fit_start(self):  # to start takes seconds, which are no fault
        opened = self.trainer.strategy.processes.world
        opened.transport.timeout = timedelta(seconds=6)
        opened.board._watchdog._stall = 6.0

    def training_step(self, batch, batch_idx):
        here("first" if self.trainer.global_step == 0 else "middle" if batch_idx == 1 else "")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        here("validation")
        return super().validation_step(batch, batch_idx)

    def on_fit_end(self):
        here("end")

here("script")
at("connect")
at("open_transport")
strategy = PipeStrategy(timeout=timedelta(seconds=90), data_parallel_size=int(sys.argv[5]))
trainer = L.Trainer(strategy=strategy, devices=int(sys.argv[4]), accelerator="cpu", max_epochs=2, **QUIET)
trainer.fit(Faulty().double(), datamodule=Data())
here("after")
"""


@dataclass
class Ended:
    """How a run ended."""

    code: int
    errors: str


def ended(folder: Path, fault: str, place: str, rank: int, devices: int = 2, replicas: int = 1) -> Ended:
    """Run the script; fails if a process is left when all have had the time to notice."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    words: Sequence[object] = (sys.executable, script, fault, place, rank, devices, replicas)
    with process_group(words, env=clean_environment(), stderr=subprocess.PIPE) as first:
        _, errors = first.communicate(timeout=240)  # until the last process has closed it
    return Ended(first.returncode, errors)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["callbacks", "connect", "open_transport", "first", "middle", "validation", "end"])
@pytest.mark.parametrize(("devices", "replicas"), [(2, 1), (4, 2)])
def test_a_first_process_that_is_killed_leaves_nobody(tmp_path: Path, place: str, devices: int, replicas: int) -> None:
    outcome = ended(tmp_path, "kill", place, 0, devices, replicas)
    assert outcome.code == -signal.SIGKILL
    told = ("has gone", "has ended without saying why", "could not be connected")
    # at the end the others have done their work, and may leave before they would notice
    assert place == "end" or any(words in outcome.errors for words in told), outcome.errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("place", ["script", "connect", "open_transport", "first", "middle", "validation"])
def test_another_process_that_is_killed_is_named(tmp_path: Path, place: str, rank: int) -> None:
    outcome = ended(tmp_path, "kill", place, rank, devices=4, replicas=2)
    assert outcome.code == 1
    assert "was killed by SIGKILL" in outcome.errors or "could not be connected" in outcome.errors, outcome.errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["callbacks", "connect"])
def test_an_error_before_all_are_connected_leaves_nobody(tmp_path: Path, place: str) -> None:
    outcome = ended(tmp_path, "raise", place, 0, devices=3)
    assert outcome.code == 1
    assert "ValueError: a bug" in outcome.errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["first", "middle", "validation"])
def test_a_first_process_that_holds_the_interpreter_does_not_hold_the_others(tmp_path: Path, place: str) -> None:
    outcome = ended(tmp_path, "lock", place, 0)
    assert outcome.code == 1
    assert "rank 0 (process 1) has not come on since" in outcome.errors.lower(), outcome.errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["first", "middle", "validation"])
def test_a_run_that_is_terminated_says_so(tmp_path: Path, place: str) -> None:
    outcome = ended(tmp_path, "terminate", place, 0)
    assert outcome.code == 128 + signal.SIGTERM
    assert outcome.errors.count("The run ends: it was asked to by SIGTERM.") == 1


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("rank", "place"),
    [pytest.param(0, "middle", marks=pytest.mark.slow), (1, "middle"),
     pytest.param(1, "validation", marks=pytest.mark.slow)],
)  # fmt: skip
def test_an_interrupt_of_one_process_ends_all_as_an_interrupt(tmp_path: Path, rank: int, place: str) -> None:
    outcome = ended(tmp_path, "interrupt", place, rank)
    assert outcome.code == 1
    assert "Detected KeyboardInterrupt" in outcome.errors
    assert "CommunicationError" not in outcome.errors
    assert "Traceback" not in outcome.errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_error_of_another_process_after_the_run_is_no_success(tmp_path: Path) -> None:
    outcome = ended(tmp_path, "raise", "after", 1)
    assert outcome.code == 1
    assert "ValueError: a bug" in outcome.errors


RUNS, AT_ONCE = 100, 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_short_runs_end_without_a_crash(tmp_path: Path) -> None:
    """Several at once on few cores: threads that come back late find an interpreter that is ending."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for _ in range(0, RUNS, AT_ONCE):
        command = [sys.executable, str(script), "none", "", "0", "2", "1"]
        runs = [
            subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True)
            for _ in range(AT_ONCE)
        ]
        for run in runs:
            _, errors = run.communicate(timeout=600)
            assert run.returncode == 0, errors
            assert "terminate called" not in errors
