"""Schedules without a flush under a Trainer, with layers that sleep: no bubble in the steady state."""

from __future__ import annotations

import io
import statistics
import time
from contextlib import redirect_stdout
from itertools import pairwise

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import schedules
from lightning_pipe.simulate import simulate
from recipes.reproduce.sleeping import Sleeper
from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.oracle import SILENT
from tests.support.trainer_runs import quiet

TOLERANCES = {4: 0.03, 8: 0.05}
FORWARD, BACKWARD, ROWS = 0.04, 0.08, 4
"""Seconds that a layer sleeps for a micro-batch, and the rows of a batch."""
RUNS = 8
"""Layers of a stage x micro-batches of a batch: as much sleep in every batch, whatever the schedule, and long beside
the time of a message, which 1F1B without a flush cannot hide."""
SKIPPED = 12
"""Batches that fill the pipeline and agree on what travels."""


class Sleeping(L.LightningModule):
    """Layers whose compute needs no core; notes the end of every batch."""

    def __init__(self, layers: int, micro_batches: int) -> None:
        super().__init__()
        each = FORWARD * micro_batches / ROWS
        self.layers = nn.Sequential(*(Sleeper(each, BACKWARD / 2) for _ in range(layers)))
        self.ends: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch.requires_grad_()).sum()
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *args: object) -> None:
        self.ends.append(time.monotonic())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(100 * ROWS, 4), batch_size=ROWS)


def run(quick: bool) -> list[Finding]:
    """The share of the time from batch to batch in which a rank's layers do not sleep."""
    findings = []
    for schedule, ranks, micro_batches in (("pipedream", 4, 1), ("pipedream_2bw", 4, 4), ("pipedream", 8, 1)):
        options = {"schedule": schedule, "ranks": ranks, "micro_batches": micro_batches}
        batches = (8 if quick else 20) + SKIPPED
        ends = processes.run_trainers(measure, ranks, timeout=200, batches=batches, **options)[0]
        # the last batch is followed by those in flight
        period = statistics.median(later - earlier for earlier, later in pairwise(ends[SKIPPED:-1]))
        asleep = RUNS * (FORWARD + BACKWARD)
        expected = float(simulate(schedules.get(schedule).build(ranks, 8 * ranks)).steady_bubble_ratio)
        findings.append(
            Finding(
                f"{schedule} under a Trainer, {ranks} ranks",
                f"bubble {1 - asleep / period:.3f}, simulated {expected:.3f}",
                f"within {TOLERANCES[ranks]}",
                abs(1 - asleep / period - expected) <= TOLERANCES[ranks],
            )
        )
    return findings


def measure(process: int, schedule: str, ranks: int, micro_batches: int, batches: int) -> list[float]:
    """When each call of ``training_step`` ended."""
    from lightning_pipe import PipeStrategy

    quiet()
    module = Sleeping(ranks * RUNS // micro_batches, micro_batches)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PipeStrategy(schedule=schedule, micro_batches=micro_batches, layers="layers"),
        max_epochs=1,
        limit_train_batches=batches,
        **SILENT,
    )
    with redirect_stdout(io.StringIO()):  # the plan, and the closing line with start and end in it
        trainer.fit(module)
    return module.ends
