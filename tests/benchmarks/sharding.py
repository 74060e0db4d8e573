"""Parameters, gradients and optimizer state of each process, where several divide them, beside the plan's."""

from __future__ import annotations

import ctypes
import warnings
from itertools import product
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.config import Sharding
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.planning.division import factors
from tests.benchmarks.construction import MB, peak, reset
from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.trainer_runs import QUIET, quiet

WAYS: dict[str, Sharding] = {
    "undivided": False,
    "shard_optimizer=True": True,
    'shard_optimizer="gradients"': "gradients",
}
ACCUMULATED = 2
_MMAP_THRESHOLD = -3
"""Of glibc's ``mallopt``."""
ALLOWED = 60 * MB
"""Above the plan: two buckets under way."""
UNEVEN = 0.05
"""Parameters are divided as wholes: shares differ by the largest one at most."""


class Wide(L.LightningModule):
    """Layers with many parameters and little to compute, trained by Adam."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4, foreach=False)


class Most(L.Callback):
    """What a process holds between two batches of a step, and at the most from the second step on."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found["base"] = reset()

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            reset()
            self.found["weights"] = sum(p.nbytes for _, p in trainer.strategy.pipeline.local_parameters())
            states = trainer.optimizers[0].state.values()
            self.found["state"] = sum(v.nbytes for state in states for v in state.values() if v.dim())
        gradients = [p.grad for p in pl_module.parameters() if not isinstance(p.grad, AbsentTensor | None)]
        memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in gradients}
        self.found["gradients"] = max(self.found.get("gradients", 0), sum(memory.values()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found["peak"] = peak() - self.found["base"]


def run(quick: bool) -> list[Finding]:
    """Chimera's two holders of each stage, and with two pipelines four."""
    size = {"width": 512, "depth": 16} if quick else {"width": 1024, "depth": 32}
    found = []
    for holders, (name, sharding) in product((2, 4), WAYS.items()):
        ranks = processes.run_trainers(train, holders, timeout=300, holders=holders, sharding=sharding, **size)
        most = {kind: max(each[kind] for each in ranks) for kind in ranks[0]}
        weights = most["weights"]
        own = factors(holders, sharding)
        between, state = weights * own.summed, weights * own.optimizer
        planned = weights * own.values + between + state  # a batch's gradients are as large as whole weights
        right = all(
            abs(most[kind] - size) <= UNEVEN * size for kind, size in (("gradients", between), ("state", state))
        )
        found += [
            Finding(
                f"{holders} holders, {name}: of {weights / MB:.0f} MB",
                f"gradients {most['gradients'] / MB:.0f}, state {most['state'] / MB:.0f} MB",
                f"plan: {between / MB:.0f}, {state / MB:.0f} MB",
                right,
            ),
            Finding(
                "  the most on a rank, of training alone",
                f"{most['peak'] / MB:.0f} MB",
                f"plan: {planned / MB:.0f} MB",
                most["peak"] <= planned + ALLOWED,
            ),
        ]
    return found


def train(process: int, holders: int, sharding: Sharding, width: int, depth: int) -> dict[str, int]:
    """Three steps of two batches each."""
    quiet()
    warnings.filterwarnings("ignore")
    # or the C library keeps what is freed, once it has been asked for as much before
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    torch.manual_seed(1)
    held = Most()
    strategy = PipeStrategy(
        "chimera", micro_batches=2, data_parallel_size=holders // 2, shard_optimizer=sharding, gather_limit=0
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=holders,
        strategy=strategy,
        max_steps=3,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[held],
        **QUIET,
    )
    data = DataLoader(torch.zeros(64, width), batch_size=4)
    trainer.fit(Wide(width, depth), data)
    return held.found
