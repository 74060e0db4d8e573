"""Sums of gradients beside the cool-down: while earlier stages still compute, the last ones sum over the replicas."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from recipes.reproduce.sleeping import Sleeper
from tests.benchmarks.measure import Finding
from tests.support import processes

RANKS, REPLICAS, MICRO_BATCHES = 2, 2, 4
UNIT = 0.04
"""Seconds that a layer sleeps forward, and twice backward."""
NUMBERS = 12 << 20
"""Of the last stage's gradient: 48 MiB, which take a good part of its wait to sum."""


class Heavy(Sleeper):
    """A layer with a large parameter, whose gradient is there without compute."""

    def __init__(self) -> None:
        super().__init__(UNIT, UNIT)
        self.weight = nn.Parameter(torch.zeros(NUMBERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.weight[:1])


def run(quick: bool) -> list[Finding]:
    """The time of a batch whose sums begin when a stage is done, and of one whose sums begin at its end."""
    options = {"rounds": 3 if quick else 9}
    topology, findings = Topology(RANKS, REPLICAS, loss_rank=-1), []
    for scattered, words in ((False, ""), (True, ' of shard_optimizer="gradients"')):
        both = processes.run_pipeline(measure, topology, timeout=200, scattered=scattered, **options)[0]
        beside, after, alone = (statistics.median(each) for each in zip(*both, strict=True))
        findings += [
            Finding(f"sums{words} of the last stage, alone", f"{alone:.3f} s"),
            Finding(
                f"1f1b, {RANKS} ranks x {REPLICAS} replicas, sums{words} beside the cool-down",
                f"{beside:.3f} s, afterwards {after:.3f} s",
                "less by half of the sums",
                after - beside >= alone / 2,
            ),
        ]
    return findings


def measure(transport: Transport, rounds: int, scattered: bool) -> list[tuple[float, float, float]]:
    """Seconds of a batch with sums beside and after it, and those of the sums alone; all get them, or their owners."""
    module = nn.Sequential(Sleeper(UNIT, UNIT), Heavy())
    pipeline = Pipeline(module, find_layers(module), [1] * RANKS, schedules.get("1f1b"), transport)
    pipeline.partition()
    pipeline.reductions.scattered = scattered
    parts = [torch.ones(1, 4, requires_grad=True) for _ in range(MICRO_BATCHES)]
    everyone = tuple(range(transport.topology.world_size))

    def batch(*, beside: bool) -> tuple[float, float]:
        transport.barrier()
        for parameter in module.parameters():
            parameter.grad = None
        start = time.perf_counter()
        pipeline.train(lambda _, part: module(part).sum(), parts, [1 / MICRO_BATCHES] * MICRO_BATCHES, reduce=beside)
        transport.barrier()  # all ranks have come to their last backward pass
        computed = time.perf_counter()
        if not beside:
            pipeline.reductions.finish()
            transport.barrier()
        mine = (time.perf_counter() - start, time.perf_counter() - computed)
        times = transport.all_gather_object(mine, everyone)
        return max(whole for whole, _ in times), max(sums for _, sums in times)

    batch(beside=True)  # agrees on what travels
    found = []
    for _ in range(rounds):
        (beside, _), (after, alone) = batch(beside=True), batch(beside=False)
        found.append((beside, after, alone))
    return found
