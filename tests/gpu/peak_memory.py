"""Peak memory of a device beside what the plan predicts from measured layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_pipe
from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.profiling.measure import measure_profile
from lightning_pipe.transport.single_process import SingleProcess
from tests.benchmarks.measure import Finding
from tests.gpu.encoder import encoder
from tests.gpu.rows import PLACE, clear
from tests.gpu.setting import Setting

MIB = 1 << 20
STAGES, MICRO_BATCHES = 2, 4
WITHIN = 0.15


class Net(nn.Module):
    """A Transformer encoder that returns its loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(encoder(width, layers))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return F.mse_loss(y, x)


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each schedule."""
    width, layers, length, samples = (16, 4, 4, 8) if setting.small else (1024, 8, 512, 32)
    torch.manual_seed(0)
    with PLACE:
        net = Net(width, layers)
    batch = torch.randn(samples, length, width, device=PLACE)
    transport = SingleProcess(PLACE)
    profile = measure_profile(transport, net, batch, layers="layers", step=lambda module, part: module(part), rounds=2)
    for schedule in ("gpipe", "1f1b"):
        plan = lightning_pipe.plan(
            net, 1, batch=samples, schedule=schedule, stages=STAGES, micro_batches=MICRO_BATCHES, layers="layers",
            profile=profile,
        )  # fmt: skip
        predicted = sum(stage.bytes for stage in plan.stages)
        name = f"{schedule}, {STAGES} stages, {MICRO_BATCHES} micro-batches"
        peak = _peak(net, batch, schedule)
        reached = abs(predicted / peak - 1) <= WITHIN
        value = f"{peak / MIB:.0f} MiB, predicted {predicted / MIB:.0f} MiB"
        yield Finding(name, value, f"within {WITHIN:.0%}", reached)


def _peak(net: Any, batch: Tensor, schedule: str) -> int:
    """The most bytes that tensors took in the third step, without what others have on the device."""
    net.zero_grad()
    clear()
    before = torch.cuda.memory_allocated() - _bytes(net)
    transport = SingleProcess(PLACE)
    layers = find_layers(net, "layers")
    pipeline = Pipeline(net, layers, divide(net, layers, STAGES), schedules.get(schedule), transport)
    pipeline.partition()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        pipeline.train(lambda _, part: net(part), list(batch.chunk(MICRO_BATCHES)), [1 / MICRO_BATCHES] * MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.restore()
    return torch.cuda.max_memory_allocated() - before


def _bytes(net: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in net.parameters())
