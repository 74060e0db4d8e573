"""How the other processes of a run are started."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from omegaconf import OmegaConf

from lightning_pipe.config import layout
from lightning_pipe.schedules import get
from lightning_pipe.trainer import launcher
from lightning_pipe.trainer.launcher import ScriptLauncher
from lightning_pipe.trainer.world import World
from tests.support.processes import run_trainers

SCRIPT = """
import hydra, lightning as L, lightning_pipe
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path=None)
def main(config):
    trainer = L.Trainer(accelerator="cpu", devices=config.devices, strategy="pipe", logger=False, max_epochs=1,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    from tests.support.lit_modules import Data, Lit
    trainer.fit(Lit().double(), datamodule=Data())
    folder = HydraConfig.get().runtime.output_dir
    with open(f"{folder}/process_{trainer.global_rank}_of_{trainer.world_size}", "w"):
        pass

main()
"""


def clean_environment() -> dict[str, str]:
    """Without the variables that a Trainer leaves in its process: with them a script would wait for a launcher."""
    left = {name: value for name, value in os.environ.items() if name not in launcher._VARIABLES}
    return left | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def job(number: int, folder: str) -> Any:
    """Hydra's configuration in one job of a sweep."""
    return OmegaConf.create(
        {
            "job": {"num": number, "name": "train"},
            "runtime": {"output_dir": folder, "cwd": "/work"},
            "overrides": {
                "task": ["trainer.devices=2", "optim.lr=0.1"],
                "hydra": ["hydra.mode=MULTIRUN", "hydra.sweep.dir=out", "hydra.verbose=true"],
            },
        }
    )


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_hydra", lambda: job(3, "out/it's"))
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "-cn", "big", "trainer.devices=2,3", "--config-dir=conf"])


def test_children_get_the_overrides_of_the_job(in_job: None) -> None:
    command, folder = launcher._command(local_rank=1)
    assert folder == "/work"
    arguments = command[command.index("-cn") :]
    assert arguments == [
        *["-cn", "big", "--config-dir=conf", "trainer.devices=2", "optim.lr=0.1", "hydra.verbose=true"],
        *[
            "hydra.run.dir='out/it\\'s'",
            "hydra.output_subdir=null",
            "hydra.job.name=train_process_1",
            "hydra.job.num=3",
        ],
    ]
    assert "-m" not in arguments


def test_without_hydra_the_command_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--devices", "2"])
    command, folder = launcher._command(local_rank=1)
    assert command[-2:] == ["--devices", "2"]
    assert folder is None


class Process:
    """Stands for a child."""

    def __init__(self, *arguments: Any, env: dict[str, str], **options: Any) -> None:
        self.env, self.waited = env, False
        self.pid = 0

    def wait(self, timeout: float | None = None) -> int:
        self.waited = True
        return 0

    def poll(self) -> int | None:
        return 0 if self.waited else None


def test_the_next_job_finds_nothing_of_the_last(in_job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    for name in launcher._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    clean = dict(os.environ)
    monkeypatch.setattr(launcher, "subprocess", SimpleNamespace(Popen=Process))
    starter = ScriptLauncher(LightningEnvironment(), num_processes=3, num_nodes=1)
    starter._call_children_scripts()
    assert [child.env["LOCAL_RANK"] for child in starter.procs] == ["1", "2"]  # type: ignore[attr-defined]
    assert os.environ["WORLD_SIZE"] == "3"
    ScriptLauncher.forget_finished_job()  # still the same job
    assert os.environ["WORLD_SIZE"] == "3"
    monkeypatch.setattr(launcher, "_hydra", lambda: job(4, "other"))
    dist.distributed_c10d._world.group_count = 1  # the job has failed while its process group was made
    ScriptLauncher.forget_finished_job()
    assert dist.distributed_c10d._world.group_count == 0
    assert dict(os.environ) == clean
    assert all(child.waited for child in starter.procs)  # type: ignore[attr-defined]
    os.environ.update(before)


def two_jobs(process: int) -> tuple[list[float], list[bool]]:
    """Opens a world for two jobs in turn at one address; the sums over the processes, and whether the stores end."""
    worlds, sums, ends = [], [], []
    environment = LightningEnvironment()
    environment.set_world_size(2)
    environment.set_global_rank(process)
    for number in range(2):
        ScriptLauncher._started = launcher._Started(f"job {number}", {})
        opened = World.open(layout(2), get("gpipe"), torch.device("cpu"), environment, "gloo", timedelta(seconds=10))
        ScriptLauncher.belongs_to_job(opened)
        worlds.append(opened)  # as the traceback of a job's error may refer to it
        tensor = torch.ones(1)
        opened.transport.all_reduce(tensor, opened.everyone).wait()
        sums.append(tensor.item())
        ScriptLauncher.forget_finished_job()
        with socket.socket() as sock:
            store = (environment.main_address, environment.main_port)
            ends.append(process > 0 or sock.connect_ex(store) == errno.ECONNREFUSED)
    return sums, ends


def test_a_job_does_not_find_the_store_of_the_last() -> None:
    # with its store a job would find the addresses of processes that have gone
    assert run_trainers(two_jobs, 2, timeout=40.0) == [([2.0, 2.0], [True, True])] * 2


FAILING = """
import sys
import lightning as L
import torch
import lightning_pipe
from tests.support.lit_modules import Data, Lit
from tests.support.trainer_runs import QUIET

class Fails(Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == int(sys.argv[1]):
            raise ValueError("a bug")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer] * 2 if sys.argv[1] == "2" else optimizer

trainer = L.Trainer(strategy="pipe", devices=2, accelerator="cpu", max_epochs=1, **QUIET)
trainer.fit(Fails().double(), datamodule=Data())
"""


# tests/faults has a run of this kind among the fast tests
@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "message"),
    [
        ("1", "ValueError: a bug"),
        ("0", "ValueError: a bug"),
        ("2", "ConfigurationError: configure_optimizers returned several"),
    ],
)
def test_an_error_is_told_once(process: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    environment = clean_environment()
    ended = subprocess.run(
        [sys.executable, str(script), process], capture_output=True, text=True, timeout=110, env=environment
    )
    assert ended.returncode == 1
    assert ended.stderr.count(message) == 1, ended.stderr
    # nobody's traceback but that of the first process, which may quote one
    assert "[rank1]" not in ended.stderr


@pytest.mark.slow
def test_a_sweep_over_the_number_of_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = clean_environment()
    command = [sys.executable, str(script), "-m", "+devices=2,3,2", f"hydra.sweep.dir={tmp_path}/out"]
    subprocess.run(command, check=True, timeout=110, env=environment, cwd=tmp_path)
    found = {folder: sorted(p.name for p in (tmp_path / "out" / folder).glob("process_*")) for folder in "012"}
    worlds = {"0": 2, "1": 3, "2": 2}
    assert found == {
        folder: [f"process_{process}_of_{size}" for process in range(size)] for folder, size in worlds.items()
    }
