"""One module at several places of the sequence, trained with what a Trainer offers, equals one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy, deferred_init
from tests.support.pairs import asked, slow_but
from tests.support.processes import in_turn
from tests.support.trainer_runs import QUIET, quiet

WIDTH, ROWS, SIZE = 5, 20, 8
"""Two batches and a short one."""


class Depths(L.LightningModule):
    """A sequence of layers of which equal letters are one module."""

    def __init__(self, letters: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        blocks = {letter: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for letter in sorted({*letters})}
        self.net = nn.Sequential(*(blocks[letter] for letter in letters))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x).mean(1, keepdim=True), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class OneDevice(Depths):
    """Adds up the two micro-batches, one after the other, in one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        total = x.new_zeros(())
        for part in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            total = total + self.loss(*part) * (len(part[0]) / len(x))
        self.log("loss", total, on_epoch=True)
        return total


@dataclass(frozen=True)
class Case:
    """What a training uses.

    Args:
        letters: of the layers.
        strategy: arguments of the strategy.
        trainer: arguments of the Trainer.
        callbacks: make callbacks.
        deferred: built without memory.
        resumed: goes on from a checkpoint in the middle of an epoch.
    """

    letters: str = "asbs"
    strategy: dict[str, Any] = field(default_factory=lambda: {"layers": "net"})
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], L.Callback], ...] = ()
    deferred: bool = False
    resumed: bool = False


class Saves(L.Callback):
    """Saves after the first batch of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def trained(case: Case, folder: Path, *, plain: bool) -> dict[str, Tensor]:
    """Weights, and what was logged."""
    quiet()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=SIZE)

    def trainer(*more: L.Callback) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            devices=1 if plain else 2,
            strategy="auto" if plain else PipeStrategy(micro_batches=2, **case.strategy),
            callbacks=[*(make() for make in case.callbacks), *more],
            **{"max_epochs": 3, "num_sanity_val_steps": 0, **QUIET, **case.trainer},
        )

    def module() -> L.LightningModule:
        with deferred_init() if case.deferred and not plain else nullcontext():
            return (OneDevice if plain else Depths)(case.letters).double()

    path = folder / ("plain.ckpt" if plain else "pipeline.ckpt")
    if case.resumed:
        trainer(Saves(path)).fit(module(), data, data)
    last, trained = trainer(), module()
    last.fit(trained, data, data, ckpt_path=path if case.resumed else None)
    return {name: value.double() for name, value in (trained.state_dict() | last.callback_metrics).items()}


INSIDE: dict[str, Any] = {"letters": "ssss", "strategy": {"layers": ["net.0.0", "net.0.1"], "passes": 4}}
FAST = {
    "clipped_and_accumulated": Case(trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "max_epochs": 2}),
    "passes": Case(**INSIDE, trainer={"gradient_clip_val": 0.05, "max_epochs": 2}),
}
SLOW = {
    "by_value": Case(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "swa": Case(callbacks=(lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1),)),
    "ema": Case(callbacks=(lambda: callbacks.EMAWeightAveraging(decay=0.9),)),
    "deferred": Case(deferred=True),
    "resumed": Case(resumed=True, trainer={"accumulate_grad_batches": 1}),
    "interleaved": Case(letters="asbscsds", strategy={"layers": "net", "schedule": "interleaved"}),
    "passes_resumed": Case(**INSIDE, resumed=True),
}
CASES = {**FAST, **SLOW}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What processes have after the cases that were asked for, in one world."""
    names = asked(request, "name")
    return in_turn({name: partial(on_rank, name=name, folder=tmp_path_factory.mktemp(name)) for name in names}, 2)


def on_rank(process: int, name: str, folder: Path) -> dict[str, Tensor]:
    return trained(CASES[name], folder, plain=False)


@pytest.mark.parametrize("name", slow_but(CASES, *FAST))
def test_a_module_at_several_depths_trains_as_on_one_device(
    name: str, found: dict[str, list[Any]], tmp_path: Path
) -> None:
    expected = trained(CASES[name], tmp_path, plain=True)
    for values in found[name]:
        torch.testing.assert_close(values, expected, rtol=0.0, atol=1e-12)
