"""How the other processes of a run are started."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_pipe.trainer import launcher
from lightning_pipe.trainer.connect import RUN
from lightning_pipe.trainer.launcher import CHILD, ScriptLauncher, end_all, end_with_parent, observe
from tests.support.processes import outcomes, run_trainers

SCRIPT = """
import hydra, lightning as L, lightning_pipe

@hydra.main(version_base=None, config_path=None)
def main(config):
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="pipe", logger=False, max_epochs=1,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    from tests.support.lit_modules import Data, Lit
    trainer.fit(Lit().double(), datamodule=Data())

main()
"""
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", RUN)


def clean_environment() -> dict[str, str]:
    """Without the variables that a Trainer leaves in its process: with them a script would wait for a launcher."""
    left = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return left | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def swept(process: int, folder: Path) -> int | str | None:
    """What the script ends with; a forked process has the libraries that a fresh one imports first."""
    for name in (*VARIABLES, "RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.chdir(folder)
    sys.argv = ["train.py", "-m", "+lr=1,2", f"hydra.sweep.dir={folder}/out"]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("train.py", run_name="__main__")
    return ended.value.code


def test_a_sweep_of_hydra_says_how_to_start_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (ended,) = outcomes(swept, 1, group_timeout=None, folder=tmp_path)
    assert ended.value == 1, ended.trace
    assert "torchrun --standalone --nproc-per-node 2 train.py -m" in ended.output


PATIENT = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


def started(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


def test_all_are_ended_those_that_are_stopped_or_deaf_too() -> None:
    stopped, deaf = started(PATIENT), started(DEAF)
    assert deaf.stdout is not None
    deaf.stdout.readline()
    stopped.send_signal(signal.SIGSTOP)
    end_all([stopped, deaf], 0.0)
    assert [process.wait(10) for process in (stopped, deaf)] == [-signal.SIGKILL] * 2


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process would have left."""
    codes: list[int] = []
    monkeypatch.setattr(launcher, "leave", codes.append)
    monkeypatch.setattr(launcher, "_NOTICING", 0.2)
    return codes


@pytest.mark.parametrize(("script", "code"), [("import os; os.kill(os.getpid(), 9)", -9), ("raise SystemExit(7)", 7)])
def test_all_end_when_one_fails(script: str, code: int, left: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    patient = started(PATIENT)
    observe([patient, started(script)])
    assert left == [1]
    assert (
        capsys.readouterr().err
        == f"Process 2 of this host has ended with code {code}. All processes of this host end.\n"
    )
    assert patient.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("code", "expected"), [(0, []), (143, []), (3, [1])])
def test_another_process_that_fails_after_the_run_makes_this_one_fail(
    code: int, expected: list[int], left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr(ScriptLauncher, "_failed", False)
    starts = ScriptLauncher(LightningEnvironment(), 2, 1)
    starts.procs = [started(f"raise SystemExit({code})")]
    starts._end_with_others(0)
    assert left == []
    starts._end_with_others(os.getpid())
    assert left == expected


def left_behind(process: int, when: str) -> bytes:
    """What a process says whose parent is killed, before it begins to end with it or afterwards."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.environ[CHILD] = str(os.getpid())
        if os.fork() == 0:
            os.write(writing, b"begins ")
            while when == "early" and os.getppid() == int(os.environ[CHILD]):
                time.sleep(0.01)
            end_with_parent()
            os.write(writing, b"lives ")
        time.sleep(90)
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 7)
    if when == "late":
        said += os.read(reading, 6)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    return said + os.read(reading, 6)  # nothing comes once both have ended


@pytest.mark.parametrize(("when", "said"), [("early", b"begins "), ("late", b"begins lives ")])
def test_a_child_ends_with_its_parent_even_if_that_has_gone_before(when: str, said: bytes) -> None:
    assert run_trainers(left_behind, 1, timeout=60, when=when) == [said]
