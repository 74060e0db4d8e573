"""Evaluations whose processes get real signals between two batches: all end, with a reason, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CommunicationError
from tests.support import processes
from tests.support.evaluated_modules import Evaluated, loader
from tests.support.process_groups import check_gone, process_group
from tests.support.trainer_runs import QUIET
from tests.trainer.test_launcher import clean_environment

SCRIPT = """
import os, sys, time
import lightning as L
from torch import nn
from torch.utils.data import DataLoader
from lightning_pipe import PipeStrategy
from tests.support.evaluated_modules import SIZE, Evaluated, Rows
from tests.support.trainer_runs import QUIET

what, devices, schedule, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.005)
        return x

class Told(Evaluated):
    def __init__(self):
        super().__init__()
        for layer in self.model:
            layer.append(Slow())

    def tell(self, index):
        if index == 3:
            with open(f"{folder}/{os.getpid()}", "w") as file:
                file.write(str(self.trainer.global_rank))

    def validation_step(self, batch, index):
        self.tell(index)
        return super().validation_step(batch, index)

    def predict_step(self, batch, index):
        self.tell(index)
        h = self(batch[0])
        for _ in range(50 if what == "passes" else 0):
            h = self(h)
        return h

strategy = PipeStrategy(layers="model", schedule=schedule)
trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **QUIET)
data, module = DataLoader(Rows(4000), batch_size=SIZE), Told().double()
if what == "validate":
    trainer.validate(module, data, verbose=False)
else:
    trainer.predict(module, data, return_predictions=False)
"""


def of_processes(folder: Path, number: int, first: subprocess.Popen[str]) -> dict[int, int]:
    """The process of each rank, as soon as all have come to the fourth batch."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and first.poll() is None:
        found = {file.read_text(): int(file.name) for file in folder.iterdir() if file.name.isdigit()}
        if len(found) == number and "" not in found:
            return {int(rank): process for rank, process in found.items()}
        time.sleep(0.05)
    pytest.fail("the evaluation has not begun")


def ended(folder: Path, what: str, number: int, who: int | None, devices: int, schedule: str) -> tuple[int, str]:
    """The exit code of the first process and what all have written; fails if something is left."""
    script = folder / "evaluate.py"
    script.write_text(SCRIPT)
    words = [sys.executable, script, what, devices, schedule, folder]
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with process_group(words, env=clean_environment(), **outputs) as first:
        ranks = of_processes(folder, devices, first)
        if who is None:
            os.killpg(first.pid, number)
        else:
            os.kill(ranks[who], number)
        text, _ = first.communicate(timeout=40)  # until the last process has closed it
        check_gone(first, 10)
    return first.returncode, text


def check(folder: Path, what: str, number: int, who: int | None, devices: int, schedule: str = "1f1b") -> None:
    code, text = ended(folder, what, number, who, devices, schedule)
    if number == signal.SIGKILL:
        # rank 0 has no words of its own when it is killed: another rank says that it has gone
        words = "was killed by SIGKILL" if who else "has ended without saying why"
        assert code == (1 if who else -signal.SIGKILL)
        assert words in text, text
    elif number == signal.SIGTERM:
        assert code == 143
        assert re.search("asked to (by|end by) SIGTERM", text), text
        assert "Traceback" not in text
    else:
        assert code == 1
        assert "KeyboardInterrupt" in text, text


class Killed(Evaluated):
    """One rank is killed in the middle of an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if batch_idx == 3 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().validation_step(batch, batch_idx)


def killed(process: int) -> str:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=PipeStrategy(layers="model"), **QUIET)
    with pytest.raises(CommunicationError) as ended:
        trainer.validate(Killed().double(), loader(), verbose=False)
    return str(ended.value)


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_ends_the_other() -> None:
    last, first = processes.outcomes(killed, 2, timeout=50, group_timeout=None)
    assert isinstance(first.error, processes.ProcessDiedError)
    assert last.error is None
    assert "rank 1" in last.value  # it could not send, or not receive
    assert "a process may have been killed" in last.value


SWEEP: list[tuple[str, int, int | None]] = [
    ("validate", number, who) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) for who in (0, 1, 2)
]
SWEEP += [("validate", signal.SIGINT, None), ("validate", signal.SIGTERM, None), ("predict", signal.SIGTERM, None)]
SWEEP += [("predict", signal.SIGTERM, who) for who in (0, 1, 2)]
SWEEP += [("passes", signal.SIGINT, None), ("passes", signal.SIGTERM, 1), ("passes", signal.SIGKILL, 1)]


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("what", "number", "who"), SWEEP)
def test_a_signal_ends_all_of_three_ranks(tmp_path: Path, what: str, number: int, who: int | None) -> None:
    check(tmp_path, what, number, who, devices=3)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_signal_ends_ranks_with_several_stages(tmp_path: Path) -> None:
    check(tmp_path, "predict", signal.SIGKILL, 1, devices=2, schedule="interleaved")
