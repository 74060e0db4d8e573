"""Validation, test and prediction of batches, by a pipeline and on one device: layers that sleep, or multiply."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recipes.reproduce.sleeping import Sleeper
from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.oracle import SILENT
from tests.support.trainer_runs import quiet

BATCHES, OF_PRODUCTS = 50, 20
TOLERANCE = 0.10
FORWARD, ROWS = 0.04, 4
"""Seconds that a layer sleeps for a batch of so many rows."""
LONGER = 0.1
"""Seconds that layers sleep where Lightning's own loops, on all ranks, take much of the time of the cores."""
STEPS = ("validate", "test", "predict")
WIDTH, SAMPLES, PRODUCTS = 1024, 512, 8
"""Of the layers that multiply: their width, the samples of a batch, and how many there are."""


class Lit(L.LightningModule):
    """Layers whose compute needs no core, or matrix products.

    Args:
        sleeping: how many layers sleep; 0: all multiply.
        seconds: that each of them sleeps.
    """

    def __init__(self, sleeping: int, seconds: float = FORWARD) -> None:
        super().__init__()
        sleepers = (Sleeper(seconds / ROWS, seconds) for _ in range(sleeping))
        products = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(PRODUCTS))
        self.layers = nn.Sequential(*(sleepers if sleeping else products))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

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

    on_validation_start = on_test_start = on_predict_start = on_train_start = _begin
    on_validation_end = on_test_end = on_predict_end = on_train_end = _end


def run(quick: bool) -> list[Finding]:
    """The share of one device's time that a pipeline takes."""
    findings = []
    for ranks in (2, 4) if quick else (2, 4, 8):
        findings += sleeping(ranks, 1 if quick else 3)
    if not quick:
        findings += sleeping(8, 3, LONGER)
    return [*findings, *products(3 if quick else 7)]


def sleeping(ranks: int, rounds: int, seconds: float = FORWARD) -> list[Finding]:
    """One sleeping layer on each rank; and how long plain Trainers take side by side, which send each other nothing.

    Each of these runs as many batches as a pipeline has slots, with one layer. So it takes what a pipeline would take
    whose messages, and all that it does beside Lightning's own loop, cost nothing on this machine.

    Args:
        ranks: of the pipeline, and the number of the Trainers.
        rounds: in each of which the pipeline and the Trainers have new processes.
        seconds: that a layer sleeps.
    """
    slots = BATCHES + ranks - 1
    alone = {name: found[-1] for name, found in measure(0, ranks, None, seconds=seconds).items()}
    several: dict[str, list[Sequence[float]]] = {name: [] for name in STEPS}
    beside: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(rounds):  # in turns
        found = processes.run_trainers(
            measure, ranks, timeout=180, sleeping=ranks, devices=ranks, times=2, seconds=seconds
        )
        plain = {"sleeping": 1, "devices": None, "batches": slots, "times": 2, "seconds": seconds}
        trainers = processes.run_trainers(measure, ranks, timeout=180, **plain)
        for name in STEPS:
            several[name].append([each / alone[name] for each in found[0][name]])
            beside[name].append(max(each[name][-1] for each in trainers) / alone[name])
    expected, milliseconds = slots / (BATCHES * ranks), f"{seconds * 1e3:.0f} ms"
    findings = []
    for name in STEPS:
        first, again = zip(*several[name], strict=True)
        findings += [
            Finding(
                f"{name}, {ranks} ranks, {milliseconds}",
                f"{_spread(again)} of {alone[name]:.2f} s",
                f"{expected:.3f}, within {TOLERANCE:.0%}",
                statistics.median(again) <= expected * (1 + TOLERANCE),
            ),
            Finding(f"the first {name} of its processes", _spread(first), "no target", None),
            Finding(
                f"the same by {ranks} plain Trainers side by side, a layer each",
                _spread(beside[name]),
                "no target: without messages",
                None,
            ),
        ]
    return findings


def _spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


def products(rounds: int) -> list[Finding]:
    """How much faster two ranks are than one device where layers multiply matrices: training, and evaluation."""
    ratios: dict[str, list[float]] = {name: [] for name in ("fit", *STEPS)}
    for _ in range(rounds):  # in turns
        alone = processes.run_trainers(measure, 1, timeout=120, sleeping=0, devices=None)[0]
        several = processes.run_trainers(measure, 2, timeout=120, sleeping=0, devices=2)[0]
        for name, found in ratios.items():
            found.append(alone[name][-1] / several[name][-1])
    training = statistics.median(ratios["fit"])
    return [
        Finding(
            f"{name}, matrix products on 2 ranks",
            f"{statistics.median(found):.2f} times as fast ({min(found):.2f} to {max(found):.2f})",
            "" if name == "fit" else f"training's {training:.2f} at least",
            None if name == "fit" else statistics.median(found) >= training,
        )
        for name, found in ratios.items()
    ]


def measure(
    process: int,
    sleeping: int,
    devices: int | None,
    batches: int = BATCHES,
    times: int = 1,
    seconds: float = FORWARD,
) -> dict[str, list[float]]:
    """Seconds of each evaluation, and of training where layers do not sleep.

    The first evaluation of a process takes some time of its own: Lightning and torch import parts of themselves, and
    Python is slower the first times that it runs a function.

    Args:
        process: this one.
        sleeping: layers that sleep; 0: layers that multiply.
        devices: of the pipeline; ``None``: one plain device.
        batches: how many, where layers sleep.
        times: how often each is repeated.
        seconds: that a layer sleeps.
    """
    from lightning_pipe import PipeStrategy

    quiet()
    stopwatch = Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy(schedule="1f1b") if devices else "auto",
        max_epochs=1,
        callbacks=[stopwatch],
        **SILENT,
    )
    samples, width, batches = (ROWS, 4, batches) if sleeping else (SAMPLES, WIDTH, OF_PRODUCTS)
    module, data = Lit(sleeping, seconds), DataLoader(torch.ones(samples * batches, width), batch_size=samples)
    torch.set_num_threads(1)
    measured: dict[str, list[float]] = {name: [] for name in (STEPS if sleeping else ("fit", *STEPS))}
    for name, found in list(measured.items()) * times:
        options = {"verbose": False} if name in ("validate", "test") else {}
        getattr(trainer, name)(module, data, **options)
        found.append(stopwatch.seconds)
    return measured
