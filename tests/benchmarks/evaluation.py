"""Validation, test and prediction of 50 batches, with layers that sleep: a pipeline, against one device."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.benchmarks.bubble import SleepingLayer
from tests.benchmarks.measure import Finding
from tests.support import processes

BATCHES = 50
TOLERANCE = 0.10
STEPS = ("validate", "test", "predict")


class Sleeping(L.LightningModule):
    """Layers whose compute needs no core."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(SleepingLayer() for _ in range(layers)))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self.layers(batch).mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self.layers(batch).mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch)


class Stopwatch(L.Callback):
    """Seconds from the hook at the start of a loop to the one at its end."""

    def __init__(self) -> None:
        self.start = self.seconds = 0.0

    def _begin(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.start

    on_validation_start = on_test_start = on_predict_start = _begin
    on_validation_end = on_test_end = on_predict_end = _end


def run(quick: bool) -> list[Finding]:
    """The share of one device's time that a pipeline takes."""
    findings = []
    for ranks in (2, 4) if quick else (2, 4, 8):
        alone = measure(0, ranks, None)
        several = processes.run_trainers(measure, ranks, timeout=120, layers=ranks, devices=ranks)[0]
        expected = (BATCHES + ranks - 1) / (BATCHES * ranks)
        for name in STEPS:
            share = several[name] / alone[name]
            findings.append(
                Finding(
                    f"{name}, {ranks} ranks",
                    f"{several[name]:.2f} s of {alone[name]:.2f} s: {share:.3f}",
                    f"{expected:.3f}, within {TOLERANCE:.0%}",
                    share <= expected * (1 + TOLERANCE),
                )
            )
    return findings


def measure(process: int, layers: int, devices: int | None) -> dict[str, float]:
    """Seconds of each evaluation; ``devices=None``: on one plain device."""
    from lightning_pipe import PipeStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stopwatch = Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy() if devices else "auto",
        callbacks=[stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = Sleeping(layers), DataLoader(torch.ones(4 * BATCHES, 4), batch_size=4)
    seconds = {}
    for name in STEPS:
        options = {} if name == "predict" else {"verbose": False}
        getattr(trainer, name)(module, data, **options)
        seconds[name] = stopwatch.seconds
    return seconds
