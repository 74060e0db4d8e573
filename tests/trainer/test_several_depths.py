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
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    """Adds up the micro-batches of each replica, one after the other, in one step.

    Args:
        letters: of the layers.
        micro_batches: of each batch.
        replicas: the samples of a batch are dealt out to so many.
    """

    def __init__(self, letters: str, micro_batches: int, replicas: int) -> None:
        super().__init__(letters)
        self.micro_batches, self.replicas = micro_batches, replicas

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        total = x.new_zeros(())
        for replica in range(self.replicas):
            own = slice(replica, None, self.replicas)
            for part in zip(*(each[own].tensor_split(self.micro_batches) for each in (x, y)), strict=True):
                total = total + self.loss(*part) * (len(part[0]) / len(x))
        self.log("loss", total, on_epoch=True)
        return total


@dataclass(frozen=True)
class Case:
    """What a training uses.

    Args:
        letters: of the layers.
        strategy: arguments of the strategy.
        devices: processes.
        replicas: pipelines.
        trainer: arguments of the Trainer.
        callbacks: make callbacks.
        scaled: in 16-mixed, with a scaler whose first steps overflow, and a later one.
        deferred: built without memory.
        resumed: goes on from a checkpoint in the middle of an epoch.
        tolerance: the largest difference of a weight or a logged value from one device.
    """

    letters: str = "asbs"
    strategy: dict[str, Any] = field(default_factory=lambda: {"layers": "net"})
    devices: int = 2
    replicas: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], L.Callback], ...] = ()
    scaled: bool = False
    deferred: bool = False
    resumed: bool = False
    tolerance: float = 1e-12

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float32 if self.scaled or "precision" in self.trainer else torch.float64


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
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    # with replicas Lightning deals out the samples by a sampler that shuffles
    sampler = DistributedSampler(data, 1, 0) if plain and case.replicas > 1 else None
    training = DataLoader(data, batch_size=SIZE if plain else SIZE // case.replicas, sampler=sampler)
    validation = DataLoader(data, batch_size=SIZE)

    def trainer(*more: L.Callback) -> L.Trainer:
        scaler = torch.amp.GradScaler("cpu", 2.0**20, growth_interval=3)
        return L.Trainer(
            accelerator="cpu",
            devices=1 if plain else case.devices,
            strategy="auto"
            if plain
            else PipeStrategy(micro_batches=2, data_parallel_size=case.replicas, **case.strategy),
            callbacks=[*(make() for make in case.callbacks), *more],
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if case.scaled else None,
            **{"max_epochs": 3, "num_sanity_val_steps": 0, **QUIET, **case.trainer},
        )

    def module() -> L.LightningModule:
        with deferred_init() if case.deferred and not plain else nullcontext():
            made = OneDevice(case.letters, 2, case.replicas) if plain else Depths(case.letters)
            return made.to(case.dtype)

    path = folder / ("plain.ckpt" if plain else "pipeline.ckpt")
    if case.resumed:
        trainer(Saves(path)).fit(module(), training, validation)
    last, trained = trainer(), module()
    last.fit(trained, training, validation, ckpt_path=path if case.resumed else None)
    # what a step logs is that of a replica
    logged = {name: value for name, value in last.callback_metrics.items() if case.replicas == 1 or name == "val"}
    return {name: value.double() for name, value in (trained.state_dict() | logged).items()}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    pairs = [(torch.as_tensor(value, dtype=torch.float64), expected[name]) for name, value in found.items()]
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


INSIDE: dict[str, Any] = {"letters": "ssss", "strategy": {"layers": ["net.0.0", "net.0.1"], "passes": 4}}
HALF = {"precision": "bf16-mixed"}
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
    "bf16": Case(trainer=HALF, tolerance=1e-6),
    "scaled": Case(scaled=True, trainer={"gradient_clip_val": 0.5}, tolerance=1e-6),
    "replicas": Case(devices=4, replicas=2, trainer={"gradient_clip_val": 0.05}),
    "bf16_replicas": Case(devices=4, replicas=2, trainer=HALF, tolerance=1e-6),
    "scaled_replicas": Case(devices=4, replicas=2, scaled=True, tolerance=1e-6),
    "passes_resumed": Case(**INSIDE, resumed=True),
    "passes_scaled": Case(**INSIDE, scaled=True, tolerance=1e-6),
    "passes_scaled_replicas": Case(**INSIDE, devices=4, replicas=2, scaled=True, tolerance=1e-6),
}
CASES = {**FAST, **SLOW}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What processes have after the cases that were asked for, in one world for each number of them."""
    ranks: dict[str, list[Any]] = {}
    for size in (2, 4):
        names = [name for name in asked(request, "name") if CASES[name].devices == size]
        calls = {name: partial(on_rank, name=name, folder=tmp_path_factory.mktemp(name)) for name in names}
        ranks |= in_turn(calls, size) if calls else {}
    return ranks


def on_rank(process: int, name: str, folder: Path) -> dict[str, Tensor]:
    return trained(CASES[name], folder, plain=False)


@pytest.mark.parametrize("name", slow_but(CASES, *FAST))
def test_a_module_at_several_depths_trains_as_on_one_device(
    name: str, found: dict[str, list[Any]], tmp_path: Path
) -> None:
    expected = trained(CASES[name], tmp_path, plain=True)
    for values in found[name]:
        assert largest_difference(values, expected) <= CASES[name].tolerance
