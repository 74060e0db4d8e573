"""What one batch of tiny layers costs under a Trainer: a pipeline against DDP and one device."""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.benchmarks.measure import Finding
from tests.support import processes

WIDTH, SIZE, LAYERS, MICRO_BATCHES = 8, 4, 4, 2
SKIPPED = 20
MOST_OVER_DDP = 2.0


class Tiny(L.LightningModule):
    """Four small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """When training batches end; seconds of a validation."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.validation = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_validation_start(self, *_: Any) -> None:
        self.validation = -time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self.validation += time.perf_counter()


def run(quick: bool) -> list[Finding]:
    """Milliseconds of a training batch and of a validation batch."""
    batches = 120 if quick else 300
    alone = measure(0, None, 1, batches)
    ddp = processes.run_trainers(measure, 2, timeout=120, strategy="ddp", devices=2, batches=batches)[0]
    findings = [_finding("one device", alone), _finding("DDP, 2 ranks", ddp)]
    for ranks in (2, 4):
        found = processes.run_trainers(measure, ranks, timeout=120, strategy="pipe", devices=ranks, batches=batches)[0]
        findings.append(_finding(f"pipe, {ranks} ranks", found, ddp[0] if ranks == 2 else None))
    return findings


def _finding(name: str, found: tuple[float, float], ddp: float | None = None) -> Finding:
    value = f"train {1e3 * found[0]:.2f} ms, validate {1e3 * found[1]:.2f} ms"
    if ddp is None:
        return Finding(name, value)
    return Finding(name, value, f"train at most {MOST_OVER_DDP} x DDP", found[0] <= MOST_OVER_DDP * ddp)


def measure(process: int, strategy: str | None, devices: int, batches: int) -> tuple[float, float]:
    """Seconds of a training batch (median) and of a validation batch (mean)."""
    from lightning_pipe import PipeStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    clock = Clock()
    pipe = PipeStrategy(micro_batches=MICRO_BATCHES)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=pipe if strategy == "pipe" else strategy or "auto",
        callbacks=[clock],
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(*torch.randn(2, devices * SIZE * batches, WIDTH)), batch_size=SIZE)
    module = Tiny()
    trainer.limit_train_batches = batches
    trainer.fit(module, data)
    trainer.limit_val_batches = batches
    trainer.validate(module, data, verbose=False)
    periods = [later - earlier for earlier, later in pairwise(clock.ends)][SKIPPED:]
    return statistics.median(periods), clock.validation / batches


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for finding in run(quick=True):
        print(finding)
