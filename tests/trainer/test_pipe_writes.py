"""With several pipes, what the step only sets in the LightningModule is what the last micro-batch has set."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCH = 3, 16, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()


class Model(L.LightningModule):
    """Sets attributes of its own before the layers and behind them, and adds to others."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.parts, self.read = parts, []
        self.gain, self.number, self.mean, self.text, self.steps, self.total = 1.0, 7, 0.0, "", 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = batch_idx // self.parts
        self.gain = 0.5**number
        out = self.layers(batch[0]).pow(2).mean() * self.gain
        self.number, self.text = number, f"batch {number}"
        self.mean = float(batch[0].mean())  # of the micro-batch
        self.kind = "long" if batch[0].shape[1] > 2 else "short"
        self.steps += 1
        return out

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.read += [self.gain, self.number, self.mean, self.text, self.steps, self.kind]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Averages(Model):
    """Keeps a moving average."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.total = 0.9 * self.total + 0.1 * float(batch[0].mean())
        return super().training_step(batch, batch_idx)


def trained(
    process: int, devices: int | None, model: type[Model], micro_batches: int, schedule: str = "chimera"
) -> tuple[list[Any], list[str]]:
    """What hooks read, and which attributes are warned of."""
    quiet()
    L.seed_everything(7, verbose=False)
    accumulated = 1 if devices else micro_batches
    module = model(accumulated).double()
    strategy: Any = "auto"
    if devices:
        strategy = PipeStrategy(layers="layers", micro_batches=micro_batches, schedule=schedule)
    settings = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": accumulated}
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TensorDataset(DATA), BATCH // accumulated))
    return module.read, [str(each.message) for each in caught if "by its own value" in str(each.message)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("micro_batches", "schedule"), [(2, "chimera"), (4, "chimera"), (4, "gems"), (4, "dualpipe"), (1, "chimera")]
)
def test_what_is_only_set_equals_one_device(micro_batches: int, schedule: str) -> None:
    plain, _ = trained(0, None, Model, micro_batches)
    options = {"devices": 2, "model": Model, "micro_batches": micro_batches, "schedule": schedule}
    for values, warned in run_trainers(trained, 2, timeout=40, **options):
        assert values == plain
        assert not warned


@pytest.mark.timeout(60)
def test_what_is_no_sum_is_warned_of() -> None:
    ended = run_trainers(trained, 2, timeout=40, devices=2, model=Averages, micro_batches=4)
    [warned] = [each for _, of_rank in ended for each in of_rank]
    assert "`self.total`" in warned
    assert "schedule='1f1b'" in warned
