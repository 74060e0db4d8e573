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
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from tests.benchmarks.measure import Finding, Ratio, alternate
from tests.gpu.encoder import encoder
from tests.gpu.setting import Setting
from tests.support.trainer_runs import QUIET, quiet

SLOWER = 0.97


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
    """Times of the ends of optimizer steps, when the device has done them."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.ends = setting, list[float]()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.ends):
            self.setting.finish()
            self.ends.append(time.perf_counter())


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each number of micro-batches and each model."""
    quiet()
    sizes = [(16, 2, 4, 8)] if setting.small else [(256, 8, 64, 16), (1024, 12, 512, 16)]
    steps, rounds = (3, 2) if setting.small else (12, 10)
    for size in sizes:
        for micro_batches in (2,) if setting.small else (4, 8):
            ratio = Ratio.of(*alternate(*both(setting, size, micro_batches, steps), rounds))
            width, layers, length, _ = size
            name = f"width {width}, {layers} layers, {length} tokens, {micro_batches} micro-batches"
            reached = None if setting.small else ratio.median >= SLOWER
            yield Finding(name, f"{ratio} of the plain Trainer's speed", f"median at least {SLOWER}", reached)


def both(setting: Setting, size: Sequence[int], micro_batches: int, steps: int) -> list[Callable[[], float]]:
    """Measures the plain Trainer, and one stage."""
    width, layers, length, samples = size
    strategy = partial(PipeStrategy, schedule="gpipe", micro_batches=micro_batches, stages=1)
    options = {"accumulate_grad_batches": micro_batches}
    return [
        lambda: fit(setting, width, layers, length, samples, steps * micro_batches, **options),
        lambda: fit(setting, width, layers, length, micro_batches * samples, steps, strategy=strategy()),
    ]


def fit(setting: Setting, width: int, layers: int, length: int, samples: int, batches: int, **options: Any) -> float:
    """Seconds per optimizer step of a short run, without the first two."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples * batches, length, width))
    stopwatch = Stopwatch(setting)
    arguments = {"accelerator": setting.accelerator, "devices": 1, "max_epochs": 1, **QUIET, **options}
    trainer = L.Trainer(**arguments, callbacks=[stopwatch])
    with contextlib.redirect_stdout(io.StringIO()):  # the plan
        trainer.fit(Model(width, layers), DataLoader(data, batch_size=samples))
    return (stopwatch.ends[-1] - stopwatch.ends[1]) / (len(stopwatch.ends) - 2)
