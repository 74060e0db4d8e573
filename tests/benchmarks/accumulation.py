"""One stage with m micro-batches against the plain Trainer that accumulates the same slices."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import Sequential, functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipe
from tests.benchmarks.against_torch import Block
from tests.benchmarks.measure import Finding, Ratio, alternate
from tests.support.oracle import SILENT
from tests.support.trainer_runs import quiet

WIDTH, SAMPLES, BLOCKS, STEPS = 512, 32, 8, 8
SLOWER = 0.97


class Model(L.LightningModule):
    """Regression through residual blocks; logs its loss, as everybody does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.blocks(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch(L.Callback):
    """The median seconds of processor time of the steps behind the first: one thread computes, and waits for none.

    The loss is checked with further forward passes in batches 1, 3, 7, 15 and 31: the median is that of a long run.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.ends):
            self.ends.append(time.process_time())

    @property
    def seconds(self) -> float:
        return statistics.median(later - earlier for earlier, later in pairwise(self.ends))


def run(quick: bool) -> list[Finding]:
    """The plain Trainer's time over ours."""
    quiet()
    findings = []
    for micro_batches in (4, 8):

        def ours(m: int = micro_batches) -> float:
            return fit(m * SAMPLES, strategy=lightning_pipe.PipeStrategy(schedule="gpipe", micro_batches=m, stages=1))

        def plain(m: int = micro_batches) -> float:
            return fit(SAMPLES, accumulate_grad_batches=m, limit_train_batches=m * STEPS)

        theirs, mine = alternate(plain, ours, rounds=8 if quick else 24)
        ratio = Ratio.of(theirs, mine)
        findings.append(
            Finding(
                f"{micro_batches} micro-batches on one stage",
                str(ratio),
                f"median at least {SLOWER}",
                ratio.median >= SLOWER,
            )
        )
    return findings


def fit(batch_size: int, **options: Any) -> float:
    """Seconds of processor time per optimizer step of a short run."""
    torch.manual_seed(0)
    data = TensorDataset(*torch.randn(2, STEPS * 8 * SAMPLES, WIDTH))
    stopwatch = Stopwatch()
    options = {"limit_train_batches": STEPS} | options
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        **SILENT,
        callbacks=[stopwatch],
        **options,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the plan, every time
        trainer.fit(Model(), DataLoader(data, batch_size=batch_size))
    return stopwatch.seconds
