"""Evaluation steps that call layers again: what the undone first runs have done is gone."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lightning_pipe import PipeStrategy
from tests.support.pairs import asked, slow_but
from tests.support.processes import in_turn, run_trainers
from tests.support.trainer_runs import QUIET


class Counted(nn.Module):
    """A layer that counts its calls in a buffer, and computes with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls)


class Twice(L.LightningModule):
    """Calls its layers twice for each batch, from one on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Counted() for _ in range(4)))
        self.head = nn.Linear(4, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.layers(batch[0])
        self.log("val", self.head(self.layers(out) if batch_idx >= self.first else out).mean())


def validated(process: int, devices: int | None, first: int, schedule: str = "1f1b") -> tuple[float, dict[str, float]]:
    """What is logged, and how often each layer has run."""
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    strategy: Any = PipeStrategy(layers="layers", schedule=schedule) if devices else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **QUIET)
    module = Twice(first).double()
    trainer.validate(module, DataLoader(TensorDataset(x.double()), batch_size=4), verbose=False)
    calls = {name: float(value) for name, value in module.state_dict().items() if name.endswith("calls")}
    return float(trainer.callback_metrics["val"]), calls


class Sometimes(L.LightningModule):
    """Comes back to its layers where the first number of a batch is positive; counts, and leaves a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), nn.Linear(4, 1)
        self.total, self.steps, self.hooked = SumMetric(), 0, False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.hooked:
            self.layers[0].register_forward_hook(lambda *given: given[2] + 1)
            self.hooked = True
        x = batch[0]
        out = self.layers(x)
        if x[0, 0] > 0:
            out = self.layers(out)
        self.steps += len(x)
        self.total.update(self.head(out).sum())

    def on_validation_epoch_end(self) -> None:
        self.log("total", self.total.compute())


def sometimes(process: int, rows: Tensor, devices: int | None = None, **options: Any) -> tuple[float, int, int]:
    """What is logged; how many samples are counted; hooks."""
    strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **QUIET)
    module = Sometimes().double()
    size = 2 * options.get("evaluation_micro_batches", 1)
    trainer.validate(module, DataLoader(TensorDataset(rows), batch_size=size), verbose=False)
    return float(trainer.callback_metrics["total"]), module.steps, len(module.layers[0]._forward_hooks)


def rows_of(*signs: int) -> Tensor:
    rows = torch.randn(len(signs), 4, generator=torch.Generator().manual_seed(1)).double()
    rows[:, 0] = rows[:, 0].abs() * torch.tensor(signs)
    return rows


FIRST = [
    (3, "1f1b"),
    (9, "chimera"),  # in no batch: one of two copies of each layer runs
    (0, "1f1b"),
    (2, "interleaved"),
    (2, "chimera"),
    (4, "dualpipev"),
]
SIGNS = [(-1, -1, 1, 1, 1, 1, -1, -1), (1, 1, -1, -1, -1, -1, -1, -1)]
CUT: dict[str, Any] = {"evaluation_micro_batches": 2}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[Any, list[Any]]:
    """What two ranks have."""
    calls: dict[Any, Any] = {
        (first, schedule): partial(validated, devices=2, first=first, schedule=schedule)
        for first, schedule in asked(request, "first", "schedule")
    }
    return in_turn(calls | {signs: partial(sometimes, devices=2, rows=rows_of(*signs), **CUT) for signs in SIGNS}, 2)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("first", "schedule"), slow_but(FIRST, *FIRST[:2]))
def test_a_step_in_a_stream_that_comes_back_to_layers_equals_one_device(
    first: int, schedule: str, found: dict[Any, list[Any]]
) -> None:
    """It does so in the first batch, or in a later one, when ranks have begun with the batches behind it."""
    logged, calls = validated(0, None, first)
    assert set(calls.values()) == {10.0 - min(first, 5)}
    for each in found[first, schedule]:
        assert each[0] == pytest.approx(logged, rel=1e-9)
        assert each[1] == calls


@pytest.mark.parametrize("signs", SIGNS)
def test_micro_batches_of_which_some_come_back_to_layers_count_once(
    signs: tuple[int, ...], found: dict[Any, list[Any]]
) -> None:
    rows = rows_of(*signs)
    total, *counted = sometimes(0, rows)
    assert counted == [8, 1]
    for each in (sometimes(0, rows, devices=1, stages=2, **CUT), *found[signs]):
        assert each == (pytest.approx(total, rel=1e-9), 8, 1)


@pytest.mark.timeout(90)
def test_where_one_replica_comes_back_to_layers_the_other_one_counts_once() -> None:
    rows = rows_of(-1, 1, -1, 1, -1, -1, -1, -1)  # every other row is the second replica's
    total, *_ = sometimes(0, rows[[0, 2, 1, 3, 4, 6, 5, 7]])
    for found in run_trainers(sometimes, 4, timeout=80, rows=rows, devices=4, data_parallel_size=2):
        assert found == (pytest.approx(total, rel=1e-9), 4, 1)
