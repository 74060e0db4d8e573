"""One stage with m micro-batches beside the plain Trainer that accumulates the same slices."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_pipe import PipeStrategy
from tests.benchmarks.measure import Finding, Ratio, alternate
from tests.gpu.encoder import encoder
from tests.gpu.setting import Setting
from tests.support.trainer_runs import QUIET, quiet

SLOWER = 0.97
UNTIMED, STEPS = 16, 31
"""Steps before the clock starts, and all steps. Batches 0, 1, 3, 7, 15 and 31 are looked at, later ones are not."""


class Model(L.LightningModule):
    """A Transformer encoder."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(encoder(width, layers))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch(L.Callback):
    """Seconds per optimizer step from a step on, when the device has done them.

    Args:
        untimed: steps before the clock starts.
    """

    def __init__(self, untimed: int) -> None:
        self.untimed = untimed
        self.start: float | None = None
        self.seconds = float("nan")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.untimed and self.start is None:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        torch.cuda.synchronize()
        assert self.start is not None
        self.seconds = (time.perf_counter() - self.start) / (trainer.global_step - self.untimed)


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each number of micro-batches and each model."""
    quiet()
    sizes = [(16, 2, 4, 8)] if setting.small else [(256, 8, 64, 16), (1024, 12, 256, 8)]
    steps, rounds = (3, 2) if setting.small else (STEPS, 5)
    for size in sizes:
        for micro_batches in (2,) if setting.small else (4, 8):
            ratio = Ratio.of(*alternate(*both(setting.small, size, micro_batches, steps), rounds))
            width, layers, length, _ = size
            name = f"width {width}, {layers} layers, {length} tokens, {micro_batches} micro-batches"
            reached = None if setting.small else ratio.median >= SLOWER
            yield Finding(name, f"{ratio} of the plain Trainer's speed", f"median at least {SLOWER}", reached)


def both(small: bool, size: Sequence[int], micro_batches: int, steps: int) -> list[Callable[[], float]]:
    """Measures the plain Trainer, and one stage."""
    width, layers, length, samples = size
    strategy = partial(PipeStrategy, schedule="gpipe", micro_batches=micro_batches, stages=1)
    options = {"accumulate_grad_batches": micro_batches}
    return [
        lambda: fit(small, width, layers, length, samples, steps * micro_batches, **options),
        lambda: fit(small, width, layers, length, micro_batches * samples, steps, strategy=strategy()),
    ]


def fit(small: bool, width: int, layers: int, length: int, samples: int, batches: int, **options: Any) -> float:
    """Seconds per optimizer step of a short run, without its first ones."""
    torch.manual_seed(0)
    once = TensorDataset(torch.randn(samples, length, width))
    loader = DataLoader(Subset(once, list(range(samples)) * batches), batch_size=samples)
    stopwatch = Stopwatch(1 if small else UNTIMED)
    arguments = {"accelerator": "gpu", "devices": 1, "max_epochs": 1, **QUIET, **options}
    trainer = L.Trainer(**arguments, callbacks=[stopwatch])
    with contextlib.redirect_stdout(io.StringIO()):  # the plan
        trainer.fit(Model(width, layers), loader)
    return stopwatch.seconds
