"""Peak host memory of each process that builds or loads a GPT-2 and divides it, against what it holds."""

from __future__ import annotations

import ctypes
import gc
import tempfile
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

    def __init__(self, layers: int, width: int, files: Path | None = None) -> None:
        super().__init__()
        self.model = model(layers, width) if files is None else GPT2LMHeadModel.from_pretrained(files)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def model(layers: int, width: int) -> GPT2LMHeadModel:
    """Without dropout."""
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=width, n_head=16, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


class Peaks(L.Callback):
    """The peak before the first batch and up to the end of the first step, and what is held."""

    def __init__(self) -> None:
        self.start = self.built = self.stepped = self.held = self.largest = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.built = peak() - self.start
        strategy = trainer.strategy
        assert isinstance(strategy, PipeStrategy)
        assert strategy.pipeline is not None
        sizes = [parameter.nbytes for _, parameter in strategy.pipeline.local_parameters()]
        self.held, self.largest = sum(sizes), max(sizes)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.stepped = peak() - self.start


def peak() -> int:
    """The most memory that this process has had since the last `reset`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset() -> int:
    """Forget the peak; returns what the process has now, without what the C library keeps of freed memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


WAYS = {"plain": (2,), "init_module": (2, 4), "from_pretrained": (1, 2, 4), "ckpt_path": (2, 4)}
"""How the weights come into being, and on how many ranks that is measured."""


def run(quick: bool) -> list[Finding]:
    """With about 1.5 GB of weights."""
    size = {"layers": 4, "width": 512} if quick else {"layers": 26, "width": 1024}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        processes.run_trainers(write, 1, timeout=500, folder=Path(folder), **size)
        for way, numbers in WAYS.items():
            for ranks in numbers[:2] if quick else numbers:
                ends = processes.run_trainers(
                    measure, ranks, timeout=500, ranks=ranks, way=way, folder=Path(folder), **size
                )
                for rank, (built, held, largest) in enumerate(ends):
                    limit = 1.15 * held + largest + ALLOWED
                    found.append(
                        Finding(
                            f"{way}, rank {rank} of {ranks}: peak up to the first batch",
                            f"{built / MB:.0f} MB for {held / MB:.0f} MB held",
                            "" if way == "plain" else f"at most {limit / MB:.0f} MB",
                            None if way == "plain" else built <= limit,
                        )
                    )
    return found


def write(process: int, folder: Path, **size: int) -> None:
    """Files to read: of Hugging Face with an index, and a checkpoint of Lightning's."""
    quiet()
    module = Lit(**size)
    module.model.save_pretrained(folder / "files", max_shard_size="500MB")
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, **QUIET)
    trainer.fit(module, data())
    trainer.save_checkpoint(folder / "x.ckpt")


def data() -> DataLoader[Any]:
    """Two batches of tokens."""
    return DataLoader(torch.zeros(8, LENGTH, dtype=torch.int64), batch_size=4)


def measure(process: int, ranks: int, way: str, folder: Path, **size: Any) -> tuple[int, int, int]:
    """Build and divide; the peak, what is held afterwards, and the largest parameter of it."""
    quiet()
    warnings.filterwarnings("ignore")
    peaks = Peaks()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PipeStrategy(micro_batches=2, layers="model.transformer.h"),
        max_steps=2,
        callbacks=[peaks],
        **QUIET,
    )
    model(1, 64)  # what the libraries import and allocate only now
    L.seed_everything(1, verbose=False)
    peaks.start = reset()
    with nullcontext() if way == "plain" else trainer.init_module(empty_init=way == "ckpt_path"):
        module = Lit(**size, files=folder / "files" if way == "from_pretrained" else None)
    trainer.fit(module, data(), ckpt_path=folder / "x.ckpt" if way == "ckpt_path" else None, weights_only=False)
    return peaks.built, peaks.held, peaks.largest
