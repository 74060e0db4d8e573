"""Callbacks of the recipes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar, WeightAveraging
from lightning.pytorch.utilities.data import extract_batch_size
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from recipes.report import readable


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


class Curve(L.Callback):
    """Draws the losses of training and validation by step, and what else validation measures.

    Args:
        path: of the picture.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.points: dict[str, list[tuple[int, float]]] = {}

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # its connector for loggers sets it
        if trainer.global_step % every == 0:  # reading a loss waits for a GPU
            self._keep(trainer, "train_")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._keep(trainer, "val_")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and self.points:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.draw().savefig(self.path, dpi=110)

    def draw(self) -> Figure:
        """The losses, and beside them all other metrics of validation, if there are any."""
        losses = {name: points for name, points in self.points.items() if name.endswith("_loss")}
        others = {name: points for name, points in self.points.items() if name not in losses}
        panels = [panel for panel in (losses, others) if panel]
        figure = Figure(figsize=(4.2 * len(panels), 2.9), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for name, points in panel.items():
                axes.plot(*zip(*points, strict=True), label=readable(name), marker="" if "train" in name else "o")
            highest, lowest = (
                extreme(value for points in panel.values() for _, value in points) for extreme in (max, min)
            )
            if 0 < 20 * lowest < highest > 20:  # shares are never drawn so
                axes.set_yscale("log")
            axes.set_xlabel("steps")
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        return figure

    def _keep(self, trainer: L.Trainer, start: str) -> None:
        metrics = trainer.callback_metrics  # asked for on all ranks alike, and known on the first
        for name, value in metrics.items() if trainer.is_global_zero else ():
            if name.startswith(start):
                points = self.points.setdefault(name, [])
                points[:] = [point for point in points if point[0] != trainer.global_step]
                points.append((trainer.global_step, float(value)))


class MovingAverage(WeightAveraging):
    """An exponential moving average of weights and batch-norm statistics, for validation and as the final weights.

    The average begins short, as TensorFlow's does: over the first steps its decay is (1 + steps) / (10 + steps).

    Args:
        decay: share of the average that a step keeps.
    """

    def __init__(self, decay: float = 0.9999) -> None:
        def average(old: Tensor, new: Tensor, steps: Tensor | int) -> Tensor:
            if not new.is_floating_point():
                return new
            # as a tensor: on ranks that do not have this parameter there is no number to be had
            count = torch.as_tensor(steps, dtype=old.dtype, device=old.device)
            kept = ((1 + count) / (10 + count)).clamp(max=decay)
            return torch.lerp(new.to(old.dtype), old, kept)

        super().__init__(use_buffers=True, avg_fn=average)


def progress_bar() -> ProgressBar:
    """A live bar on a terminal; elsewhere one that survives in a file."""
    return RichProgressBar() if sys.stdout.isatty() else TQDMProgressBar(refresh_rate=20)
