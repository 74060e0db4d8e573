"""The user of the campaign: a small ordinary run to which one fault happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.trainer.world import World
from tests.faults.injection import Injection

MIDDLE = 3
"""The batch in the middle of the epoch."""


class Lit(L.LightningModule):
    """Small; comes past every phase."""

    def __init__(self, injection: Injection, first: int | None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        self._injection, self._first = [injection], first

    def at(self, phase: str) -> None:
        self._injection[0].at(phase)

    def configure_callbacks(self) -> list[L.Callback]:
        self.at("configure_callbacks")
        return []

    def setup(self, stage: str) -> None:
        self.at("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # before the layers: only the last stage comes to what follows them
        if batch_idx == 0:
            self.at("first")
        if batch_idx == MIDDLE:
            self.at("middle")
            if self._first == self.global_rank:
                self._injection[0].fail()
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == MIDDLE:
            self.at("batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == MIDDLE:
            self.at("batch_end")

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.at("validation_end")

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.at("epoch_start")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("sanity" if self.trainer.sanity_checking else "validation")
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at("saving")

    def on_exception(self, exception: BaseException) -> None:
        self.at("exception")

    def on_train_end(self) -> None:
        self.at("train_end")

    def on_fit_end(self) -> None:
        self.at("fit_end")

    def teardown(self, stage: str) -> None:
        self.at("teardown")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Hears(L.Callback):
    """Hears of exceptions, which a LightningModule does not."""

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        module._injection[0].recover()  # type: ignore[index, operator, union-attr]
        module.at("exception")  # type: ignore[operator]


class Samples(Dataset[Any]):
    """Whose loading may fail."""

    def __init__(self, injection: Injection, length: int = 40) -> None:
        self.injection, self.length = injection, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == 26:
            self._fail()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 4

    def _fail(self) -> None:
        fault = self.injection
        if fault.kind in ("worker_raises", "loader_raises"):
            fault.fail()
        if fault.kind.startswith("worker") or fault.kind == "busy_worker":
            fault.happens()
        if fault.kind == "worker_is_killed":
            fault.kill()
        if fault.kind == "worker_hangs":
            fault.hang()
        if fault.kind == "busy_worker":
            time.sleep(15)


class Streams(IterableDataset[Any]):
    """Whose length differs between replicas."""

    def __init__(self, trainer: L.Trainer, injection: Injection) -> None:
        self.trainer, self.injection = trainer, injection

    def __iter__(self) -> Any:
        replica = self.trainer.strategy.data_parallel_rank
        yield from (self.injection_sample(index) for index in range(40 if replica else 24))
        self.injection.happens()

    def injection_sample(self, index: int) -> Any:
        return torch.full((8,), index / 40), index % 4


def wrap(owner: Any, name: str, injection: Injection, phase: str | Iterator[str]) -> None:
    """Come past a phase before a function of a library, or past one in each of its calls."""
    before = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        injection.at(phase if isinstance(phase, str) else next(phase, ""))
        return before(*arguments, **options)

    setattr(owner, name, wrapped)


def _start_together(folder: Path, processes: int) -> None:
    """Let no timeout count what a busy machine needs to start all processes."""
    before = World.open

    def opened(*arguments: Any, **options: Any) -> None:
        deadline = time.monotonic() + 60.0
        while len(list(folder.glob("ready*"))) < processes and time.monotonic() < deadline:
            time.sleep(0.05)
        before(*arguments, **options)

    World.open = opened  # type: ignore[method-assign]


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, while a fault happens."""
    torch.set_num_threads(1)
    kind = options["kind"]
    injection = Injection(kind, options["phase"], options["process"], folder)
    (folder / f"ready{injection.number}").touch()
    wrap(World, "open", injection, "connecting")
    _start_together(folder, options["processes"])
    phases = iter(["writing", "", "", "rewriting"])  # epoch=0.ckpt and last.ckpt, epoch=1.ckpt, last.ckpt again
    if options.get("folder"):
        wrap(FileSystemWriter, "write_data", injection, phases)
    else:
        wrap(LocalFileOpener, "commit", injection, (f"{phase}_file" for phase in phases))
    calls: list[L.Callback] = [Hears(), ModelCheckpoint(folder / "saved", "{epoch}", save_last=True)]
    if kind == "on_exception_checkpoint":
        calls.append(OnExceptionCheckpoint(str(folder)))
    strategy = PipeStrategy(
        micro_batches=2,
        data_parallel_size=options["processes"] // 2,
        timeout=timedelta(seconds=options["timeout"]),
        save_distributed_checkpoint=bool(options.get("folder")),
        shard_optimizer="parameters" if options.get("sharded") else False,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options["processes"],
        strategy=strategy,
        max_epochs=2,
        callbacks=calls,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    injection.trainer = trainer
    first = options.get("first", options["process"] if kind == "on_exception_checkpoint" else None)
    workers = 1 if "worker" in kind else 0
    samples = Streams(trainer, injection) if kind == "uneven" else Samples(injection)
    data = DataLoader(samples, batch_size=4, num_workers=workers)
    held_out = DataLoader(Samples(Injection("", "", -1, folder), 8), batch_size=4)
    resume = folder / "resume_from.ckpt" if options.get("resume") else None
    if resume is not None:
        wrap(PipeStrategy, "load_checkpoint", injection, "resuming")
    trainer.fit(Lit(injection, first), data, held_out, ckpt_path=resume)
    injection.at("after")
    print("The run has succeeded.")
