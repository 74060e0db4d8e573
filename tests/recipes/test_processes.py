"""What the processes of a job share, and what a job leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed

from recipes import processes


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*processes.RANK_VARIABLES, processes.JOB):
        monkeypatch.delenv(name, raising=False)


def test_the_first_process_reads_its_own_command_line() -> None:
    assert processes.arguments(["-m", "trainer.devices=2,3"]) == ["-m", "trainer.devices=2,3"]


def test_a_plus_before_experiment_is_accepted() -> None:
    assert processes.arguments(["+experiment=e", "+model.x=1"]) == ["experiment=e", "+model.x=1"]


def test_the_others_read_the_first_ones_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with processes.job(["trainer.devices=3"], "out/it's here", None):
        monkeypatch.setenv("LOCAL_RANK", "1")
        given = processes.arguments(["-m", "trainer.devices=2,3"])
    assert given[:2] == ["trainer.devices=3", r"hydra.run.dir='out/it\'s here'"]
    assert "hydra.output_subdir=null" in given


def test_under_another_launcher_only_rank_zero_has_an_output_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")  # first process of the second machine
    given = processes.arguments(["experiment=e"])
    assert given[0] == "experiment=e"
    assert "hydra.run.dir=." in given


def test_a_job_leaves_no_variable_group_or_process() -> None:
    before = dict(os.environ)
    with processes.job(["a=1"], "out", 1) as job:
        assert json.loads(os.environ[processes.JOB]) == {"overrides": ["a=1"], "output": "out"}
        assert os.environ["OMP_NUM_THREADS"] == "1"
        os.environ.update(MASTER_PORT="1", WORLD_SIZE="2", LOCAL_RANK="0")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        job.launcher = SimpleNamespace(procs=[child])
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    assert child.returncode == 0
    assert not job.children


def test_a_failed_job_ends_its_processes_at_once() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def fail() -> None:
        with processes.job([], "out", None) as job:
            job.launcher = SimpleNamespace(procs=[sleeper])
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert sleeper.returncode is not None


def test_after_a_failure_the_others_may_end_by_themselves() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    processes.Job(SimpleNamespace(procs=[child])).end(failed=True)
    assert child.returncode == 0


def test_lightning_s_observer_does_not_see_children_that_are_ended_here() -> None:
    left: list[int] = []

    class Child:
        pid = 7

        def terminate(self) -> None:
            left.append(len(procs))

        def poll(self) -> None:
            return None

        def wait(self, seconds: float) -> int:
            return -15

    procs = [Child(), Child()]
    processes.Job(SimpleNamespace(procs=procs)).end(failed=True)
    assert left == [0, 0]
