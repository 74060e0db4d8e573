"""Peak host memory of each process that divides a module built on the meta device, in several runs."""

from __future__ import annotations

import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from tests.benchmarks.construction import Peaks, reset
from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.trainer_runs import QUIET, quiet

RANKS = 4
ALLOWED = 1.15


class Block(nn.Module):
    """What a transformer has behind its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Adds to its input."""
        added: Tensor = self.narrow(self.wide(self.norm(hidden)).relu())
        return hidden + added


class Lit(L.LightningModule):
    """Blocks on the meta device, trained without momentum."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.size, self.net = (layers, width), nn.Sequential()

    def configure_model(self) -> None:
        layers, width = self.size
        if not len(self.net):
            with torch.device("meta"):
                self.net = nn.Sequential(*(Block(width) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(quick: bool) -> list[Finding]:
    """With 0.8 GB of weights on four ranks; several times, because holes in freed memory differ from run to run."""
    found = []
    for number in range(1, 3 if quick else 6):
        ends = processes.run_trainers(measure, RANKS, timeout=300, layers=24, width=1024)
        built, stepped = (", ".join(f"{share:.2f}" for share in shares) for shares in zip(*ends, strict=True))
        reached = all(share <= ALLOWED for share, _ in ends)
        found += [
            Finding(f"run {number}: peak before the first batch over weights", built, f"at most {ALLOWED}", reached),
            Finding(f"run {number}: peak of the first step over weights, gradients", stepped),
        ]
    return found


def measure(process: int, layers: int, width: int) -> tuple[float, float]:
    """Train a step; the peak over what is held, before the first batch and in the step."""
    quiet()
    warnings.filterwarnings("ignore")
    train(layers, 64)  # what the libraries import and allocate only now
    peaks = train(layers, width)
    return peaks.built / peaks.held, peaks.stepped / (2 * peaks.held)


def train(layers: int, width: int) -> Peaks:
    """One step."""
    peaks, module = Peaks(), Lit(layers, width)
    strategy = PipeStrategy(micro_batches=4, layers="net", gather_limit=0)
    trainer = L.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=1, callbacks=[peaks], **QUIET)
    peaks.start = reset()
    trainer.fit(module, DataLoader(torch.rand(8, width), batch_size=8))
    return peaks
