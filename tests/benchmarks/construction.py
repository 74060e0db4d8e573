"""Peak host memory of each process that builds and divides a GPT-2: whole, and without memory for foreign layers."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipe import PipeStrategy
from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.trainer_runs import QUIET, quiet

MB = 1e6
LENGTH = 16
ALLOWED = 150 * MB


class Lit(L.LightningModule):
    """A GPT-2 trained without momentum."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=16, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Peaks(L.Callback):
    """The peak before the first batch."""

    def __init__(self, start: int) -> None:
        self.start, self.built, self.held, self.largest = start, 0, 0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.built = peak() - self.start
        strategy = trainer.strategy
        assert isinstance(strategy, PipeStrategy)
        assert strategy.pipeline is not None
        sizes = [parameter.nbytes for _, parameter in strategy.pipeline.local_parameters()]
        self.held, self.largest = sum(sizes), max(sizes)


def peak() -> int:
    """The most memory that this process has had since the last `reset`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset() -> int:
    """Forget the peak; returns what the process has now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def run(quick: bool) -> list[Finding]:
    """On two ranks, with about 1.5 GB of weights."""
    size = {"layers": 4, "width": 512} if quick else {"layers": 26, "width": 1024}
    found = []
    for deferred in (False, True):
        ends = processes.run_trainers(measure, 2, timeout=500, deferred=deferred, **size)
        for rank, (built, held, largest) in enumerate(ends):
            limit = 1.15 * held + largest + ALLOWED
            found.append(
                Finding(
                    f"{'init_module' if deferred else 'plain'}, rank {rank}: peak up to the first batch",
                    f"{built / MB:.0f} MB for {held / MB:.0f} MB held",
                    f"at most {limit / MB:.0f} MB" if deferred else "",
                    built <= limit if deferred else None,
                )
            )
    return found


def measure(process: int, deferred: bool, **size: Any) -> tuple[int, int, int]:
    """Build and divide; the peak, what is held afterwards, and the largest parameter of it."""
    quiet()
    warnings.filterwarnings("ignore")
    peaks = Peaks(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipeStrategy(micro_batches=2, layers="model.transformer.h"),
        max_steps=1,
        callbacks=[peaks],
        **QUIET,
    )
    Lit(1, 64)  # what the libraries import and allocate only now
    L.seed_everything(1, verbose=False)
    peaks.start = reset()
    with trainer.init_module() if deferred else nullcontext():
        module = Lit(**size)
    trainer.fit(module, DataLoader(torch.zeros(4, LENGTH, dtype=torch.int64), batch_size=4))
    return peaks.built, peaks.held, peaks.largest
