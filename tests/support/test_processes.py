"""The worlds of processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import processes


def add(process: int, offset: int) -> tuple[int, float]:
    total = torch.tensor(float(process))
    dist.all_reduce(total)
    print(f"I am {process}")
    return process + offset, float(total)


def fail_on_one(process: int) -> None:
    if process == 1:
        raise KeyError("the message")
    dist.barrier()


def hang(process: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(f"child {child.pid}")
    time.sleep(100)


def die(process: int) -> None:
    if process == 0:
        os._exit(3)


def environment(process: int) -> tuple[str, str, bool]:
    return os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], dist.is_initialized()


def test_results_come_back_by_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert processes.run_world(add, 2, offset=10) == [(10, 1.0), (11, 1.0)]
    assert "I am 1" in capsys.readouterr().out


def test_the_first_error_comes_back_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="the message") as caught:
        processes.run_world(fail_on_one, 2)
    assert "fail_on_one" in "".join(caught.value.__notes__)


def test_everything_is_killed_at_the_timeout() -> None:
    with pytest.raises(processes.WorldTimeoutError) as caught:
        processes.run_world(hang, 2, timeout=4)
    note = "".join(caught.value.__notes__)
    assert "in hang" in note  # the stacks
    pid = int(note.split("child ")[1].split()[0])
    time.sleep(0.2)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or " Z " in stat.read_text()


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(processes.ProcessDiedError, match="Process 0 ended with code 3"):
        processes.run_world(die, 2)


def test_trainers_get_lightnings_environment() -> None:
    assert processes.run_trainers(environment, 2) == [("0", "2", False), ("1", "2", False)]
