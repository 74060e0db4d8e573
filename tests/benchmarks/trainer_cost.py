"""What one batch of tiny layers costs under a Trainer: a pipeline against DDP and one device.

Torch's own schedule beside them runs stages that are cut by hand, in Lightning's loop. What a pipeline takes beyond
that is for steps that nobody has to change. More ranks than cores show what all of them compute together.
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.oracle import SILENT
from tests.support.trainer_runs import quiet

WIDTH, SIZE, LAYERS, MICRO_BATCHES = 8, 4, 4, 2
SKIPPED = 20
MOST_OVER_DDP = 1.2
BY_HAND = "by hand"


class Tiny(L.LightningModule):
    """Four small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ByHand(Tiny):
    """One of some stages, which torch's schedule runs; all know the loss."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = self.layers[rank * LAYERS // ranks : (rank + 1) * LAYERS // ranks]
        stage = PipelineStage(self.layers, rank, ranks, torch.device("cpu"))
        # torch's schedule wants as many micro-batches as stages
        self.run = Schedule1F1B(stage, max(MICRO_BATCHES, ranks), loss_fn=F.mse_loss).step

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses, last = list[Tensor](), dist.get_world_size() - 1
        if dist.get_rank() == last:
            self.run(target=batch[1], losses=losses)
        else:
            self.run(*(batch[:1] if dist.get_rank() == 0 else ()))
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, last)
        self.log("loss", loss)
        optimizer.step()


class Clock(L.Callback):
    """When training batches end; seconds of a validation."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.validation = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_validation_start(self, *_: Any) -> None:
        self.validation = -time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self.validation += time.perf_counter()


def run(quick: bool) -> list[Finding]:
    """Milliseconds of a training batch and of a validation batch, and over those of DDP: medians over rounds."""
    batches = 120 if quick else 300
    worlds = {
        "one device": (None, 1),
        "DDP, 2 ranks": ("ddp", 2),
        "torch's 1F1B by hand, 2 ranks": (BY_HAND, 2),
        "pipe, 2 ranks": ("pipe", 2),
        "DDP, 4 ranks": ("ddp", 4),
        "torch's 1F1B by hand, 4 ranks": (BY_HAND, 4),
        "pipe, 4 ranks": ("pipe", 4),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in worlds}
    for _ in range(3 if quick else 7):  # in turns
        for name, (strategy, devices) in worlds.items():
            options = {"strategy": strategy, "devices": devices, "batches": batches}
            found[name].append(processes.run_trainers(measure, devices, timeout=120, **options)[0])
    findings = [_finding(name, times) for name, times in found.items()]
    for name, (strategy, devices) in worlds.items():
        if strategy not in ("pipe", BY_HAND):
            continue
        ratios = [ours[0] / ddp[0] for ours, ddp in zip(found[name], found[f"DDP, {devices} ranks"], strict=True)]
        over, asked = statistics.median(ratios), name.startswith("pipe")
        findings.append(
            Finding(
                f"a training batch of {name}, over DDP",
                f"{over:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"at most {MOST_OVER_DDP}" if asked else "",
                over <= MOST_OVER_DDP if asked else None,
            )
        )
    return findings


def _finding(name: str, found: list[tuple[float, float]]) -> Finding:
    train, validate = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
    return Finding(name, f"train {train:.2f} ms" + (f", validate {validate:.2f} ms" if validate else ""))


def measure(process: int, strategy: str | None, devices: int, batches: int) -> tuple[float, float]:
    """Seconds of a training batch (median) and of a validation batch (mean)."""
    from lightning_pipe import PipeStrategy

    quiet()
    torch.manual_seed(0)
    clock = Clock()
    if strategy == BY_HAND:  # as one process for Lightning, which knows nothing of stages
        dist.init_process_group("gloo")
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"):
            del os.environ[name]
    pipe = PipeStrategy(micro_batches=MICRO_BATCHES)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy == BY_HAND else devices,
        strategy={"pipe": pipe, BY_HAND: "auto", None: "auto"}.get(strategy, strategy),
        callbacks=[clock],
        max_epochs=1,
        limit_val_batches=0,
        **SILENT,
    )
    data = DataLoader(TensorDataset(*torch.randn(2, devices * SIZE * batches, WIDTH)), batch_size=SIZE)
    module = ByHand(process, devices) if strategy == BY_HAND else Tiny()
    trainer.limit_train_batches = batches
    trainer.fit(module, data)
    if strategy != BY_HAND:
        trainer.limit_val_batches = batches
        trainer.validate(module, data, verbose=False)
    periods = [later - earlier for earlier, later in pairwise(clock.ends)][SKIPPED:]
    return statistics.median(periods), clock.validation / batches
