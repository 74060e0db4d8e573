"""Callbacks of the recipes."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import override


class Throughput(L.Callback):
    """Measures training speed over all replicas: data loading counts, validation and checkpoints do not.

    Args:
        warm_up: batches at the start that are not counted.
    """

    def __init__(self, warm_up: int = 2) -> None:
        self.warm_up = warm_up
        self.samples = 0
        self.seconds = 0.0
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float | None:
        """None until a batch has been counted."""
        return self.samples / self.seconds if self.seconds else None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._since is not None and trainer.fit_loop.epoch_loop.total_batch_idx >= self.warm_up:
            replicas = getattr(trainer.strategy, "data_parallel_size", trainer.world_size)
            self.samples += extract_batch_size(batch) * int(replicas)
            self.seconds += now - self._since
        self._since = now

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = None

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = None


def progress_bar() -> ProgressBar:
    """A live bar on a terminal; elsewhere one that survives in a file."""
    return RichProgressBar() if sys.stdout.isatty() else TQDMProgressBar(refresh_rate=20)
