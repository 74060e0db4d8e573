"""Trainers over NCCL whose program changes after many equal batches, when hosts no longer wait for each other.

On the fake device (rehearsed). All of them train as one device does, or end with an error on all ranks.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.engine import kept_words
from tests.support import processes
from tests.support.fake_cuda.call import rehearse
from tests.support.pairs import slow_but
from tests.support.processes import Outcome
from tests.support.trainer_runs import QUIET, quiet

pytestmark = pytest.mark.rehearsed

WIDTH, ROWS, PARTS, BATCHES, LATE = 4, 6, 3, 10, 8
FIRST_STAGE = 1
"""The process that has it: the first process has the loss."""


class Changing(L.LightningModule):
    """Four layers, of which each of two ranks has two."""

    def __init__(self, change: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.change = change

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        late = SEEN.micro_batch(batch_idx) == 2 and batch_idx == LATE
        if late and self.change == "error" and SEEN.process == FIRST_STAGE:
            raise RuntimeError("planted")
        (x,) = batch
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            other = late if self.change == "path" else batch_idx >= LATE and self.change == "paths"
            if number == 0 and other:
                x = x * 2
            if number == 2 and late and self.change == "gradient":
                x = x.detach()
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(L.Callback):
    """Process 0 asks to stop, between two batches."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if module.change == "stop" and batch_idx == LATE and trainer.is_global_zero:
            trainer.should_stop = True


class Seen:
    """Which micro-batch a step runs, and how many messages in each batch had no words."""

    def __init__(self, process: int | None) -> None:
        self.process, self.batch, self.runs, self.unsaid = process, -1, -1, Counter[int]()

    def micro_batch(self, batch: int) -> int:
        """The step runs."""
        if batch != self.batch:
            self.batch, self.runs = batch, -1
        self.runs += 1
        return self.runs

    def say(self, hop: Any, *arguments: Any, **given: Any) -> Any:
        said = SAY(hop, *arguments, **given)
        self.unsaid[self.batch] += said is None
        return said


SAY = kept_words.Hop.say
SEEN = Seen(None)


def trained(process: int, change: str, devices: int = 2) -> tuple[dict[str, Tensor], Counter[int], int]:
    """The weights, messages without words by batch, and the number of batches."""
    global SEEN
    quiet()
    SEEN = Seen(process if devices > 1 else None)
    rows = ROWS * BATCHES - (2 if change == "shape" else 0)
    data = TensorDataset(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)))
    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "callbacks": [Stop()]}
    if devices > 1:
        strategy = PipeStrategy(
            process_group_backend="nccl",
            schedule="1f1b",
            micro_batches=PARTS,
            compare_losses=False,
            timeout=timedelta(seconds=300),
        )
        options |= {"accelerator": "gpu", "devices": devices, "strategy": strategy}
    else:
        options |= {"accelerator": "cpu", "devices": 1}
    trainer, module = L.Trainer(**options), Changing(change)
    say = lambda hop, *arguments, **given: SEEN.say(hop, *arguments, **given)  # noqa: E731
    with mock.patch.object(kept_words, "ENOUGH", 2), mock.patch.object(kept_words.Hop, "say", say):
        trainer.fit(module, DataLoader(data, ROWS))
    weights = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    return weights, SEEN.unsaid, trainer.fit_loop.epoch_loop.total_batch_idx + 1


def world(change: str) -> list[Outcome]:
    return processes.outcomes(trained, 2, timeout=90, group_timeout=None, change=change)


@pytest.mark.parametrize("change", slow_but(["paths", "shape", "stop"], "paths"))
def test_what_changes_for_a_whole_batch_trains_as_on_one_device(change: str) -> None:
    expected, _, expected_batches = trained(0, change, devices=1)
    for weights, unsaid, batches in rehearse(processes.run_trainers, trained, 2, change=change):
        assert batches == expected_batches == (LATE + 1 if change == "stop" else BATCHES)
        assert unsaid[LATE - 1] == PARTS - 1
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("change", slow_but(["gradient", "path", "error"], "gradient"))
def test_what_goes_wrong_in_a_quiet_batch_ends_all_ranks(change: str) -> None:
    """Long before the timeout of a message, with the reason on both."""
    ended = rehearse(world, change, timeout=120)
    origin = {"path": FIRST_STAGE, "error": FIRST_STAGE, "gradient": 0}[change]
    words = "planted" if change == "error" else "micro-batch 2 takes another path"
    for outcome in ended:
        assert words in outcome.trace, outcome.trace
        assert outcome.seconds < 60
    assert type(ended[origin].error).__name__ == ("RuntimeError" if change == "error" else "CutError")
