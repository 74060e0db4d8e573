"""The bubble of the running engine: layers that sleep, on four ranks, against the formula."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from recipes.reproduce.sleeping import sleep, slept
from tests.benchmarks.measure import Finding
from tests.support import processes

RANKS = 4
FORWARD, BACKWARD = 0.04, 0.08
TOLERANCE = 0.03


class _Sleep(torch.autograd.Function):
    """The identity, at leisure."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sleep(BACKWARD)
        return gradients[0], None


class SleepingLayer(nn.Module):
    """A layer whose compute needs no core, so that four ranks fit on two.

    Args:
        seconds: of a forward pass.
    """

    def __init__(self, seconds: float = FORWARD) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x * self.scale, self.seconds)
        return out


def run(quick: bool) -> list[Finding]:
    """Measured and expected bubble for GPipe and 1F1B."""
    findings = []
    for name in ("gpipe", "1f1b"):
        for micro_batches in (4, 8, 16):
            topology = Topology.for_schedule(RANKS)
            options = {"name": name, "micro_batches": micro_batches, "rounds": 3 if quick else 7}
            ratios = processes.run_pipeline(measure, topology, timeout=100, **options)[0]
            expected = (RANKS - 1) / (micro_batches + RANKS - 1)
            found = statistics.median(ratios)
            findings.append(
                Finding(
                    f"{name}, {RANKS} ranks, {micro_batches} micro-batches",
                    f"bubble {found:.3f}, formula {expected:.3f}",
                    f"within {TOLERANCE}",
                    abs(found - expected) <= TOLERANCE,
                )
            )
    return findings


def measure(transport: Transport, name: str, micro_batches: int, rounds: int) -> list[float]:
    """The bubble ratio of each round: from the last rank's arrival at the start barrier to the last rank's end."""
    module = nn.Sequential(*(SleepingLayer() for _ in range(RANKS)))
    layers = find_layers(module)
    pipeline = Pipeline(module, layers, [1] * RANKS, schedules.get(name), transport)
    pipeline.partition()
    parts = [torch.ones(1, 4) for _ in range(micro_batches)]
    everyone = tuple(range(transport.topology.world_size))
    ratios = []
    for number in range(rounds + 2):
        asleep = slept()
        arrived = time.monotonic()
        transport.barrier()
        pipeline.train(lambda _, part: module(part).sum(), parts, [1 / micro_batches] * micro_batches, seed=number)
        ended = time.monotonic()
        busy = slept() - asleep
        # The monotonic clock is the same for all processes of a host.
        times = transport.all_gather_object((arrived, ended, busy), everyone)
        makespan = max(end for _, end, _ in times) - max(start for start, _, _ in times)
        ratios.append(1 - sum(busy for _, _, busy in times) / (RANKS * makespan))
    return ratios[2:]  # the first batches agree on what travels and who holds what
