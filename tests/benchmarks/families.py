"""Every synchronous schedule with layers that sleep: the bubble next to the simulator's, and Chimera's gain."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Chimera, Family, GPipe, OneFOneB
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from recipes.reproduce.sleeping import Sleeper
from tests.benchmarks.against_torch import Block
from tests.benchmarks.measure import Finding, Ratio, alternate
from tests.support import processes

TOLERANCES = {4: 0.03, 8: 0.05}
UNIT = {4: 0.04, 8: 0.08}
"""Seconds of a rank's forward pass of one micro-batch; its backward pass takes two of them, in two halves."""

ROWS = 512
"""Of a micro-batch with real compute: the tokens of one sequence. Fewer, and adding up the gradients of Chimera's two
copies of the weights takes longer than computing them."""


class Measured(NamedTuple):
    """Medians over the rounds."""

    makespan: float
    bubble: float


def measure(transport: Transport, family: Family, micro_batches: int, rounds: int) -> Measured:
    """From the last rank's arrival at the start barrier to the last rank's end."""
    ranks = transport.topology.ranks
    stages = ranks * family.stages_per_rank
    unit = UNIT[ranks] / family.stages_per_rank
    net = nn.Sequential(*(Sleeper(unit, unit) for _ in range(stages)))
    pipeline = Pipeline(net, find_layers(net), [1] * stages, family, transport)
    pipeline.partition()
    # The input needs a gradient, so that the first stage's backward pass has both halves.
    parts = [torch.ones(1, 4) for _ in range(micro_batches)]
    everyone = tuple(range(ranks))
    makespans, bubbles = [], []
    for _ in range(rounds + 2):
        arrived, busy = time.monotonic(), pipeline.executor.busy
        transport.barrier()
        pipeline.train(lambda _, part: net(part.requires_grad_()).sum(), parts, [1 / micro_batches] * micro_batches)
        mine = (arrived, time.monotonic(), pipeline.executor.busy - busy)
        times = transport.all_gather_object(mine, everyone)
        makespan = max(end for _, end, _ in times) - max(start for start, _, _ in times)
        makespans.append(makespan)
        bubbles.append(1 - sum(busy for _, _, busy in times) / (ranks * makespan))
    return Measured(statistics.median(makespans[2:]), statistics.median(bubbles[2:]))


def _in_processes(family: Family, ranks: int, micro_batches: int, rounds: int) -> Measured:
    loss_rank = family.build(ranks, micro_batches).loss_ranks[0]
    topology = Topology.for_schedule(ranks, loss_rank=loss_rank)
    options = {"family": family, "micro_batches": micro_batches, "rounds": rounds}
    found: Measured = processes.run_pipeline(measure, topology, timeout=300, group_timeout=60, **options)[0]
    return found


def run(quick: bool) -> list[Finding]:
    """All families on four ranks, and on eight without ``quick``; then Chimera against 1F1B."""
    warnings.simplefilter("ignore")
    findings = []
    for ranks in (4,) if quick else (4, 8):
        for name in schedules.names():
            family = schedules.get(name)
            if family.synchronous:
                findings += [_bubble(each, ranks, quick) for each in family.variants()]
    return [*findings, _gain(quick), *_real_compute(quick)]


def _bubble(family: Family, ranks: int, quick: bool) -> Finding:
    micro_batches = 2 * ranks
    costs = Costs(forward=1, backward=2, backward_input=1, backward_weight=1)
    expected = float(simulate(family.build(ranks, micro_batches), costs).bubble_ratio)
    found = _in_processes(family, ranks, micro_batches, rounds=1 if quick else 3).bubble
    return Finding(
        f"{family.label}, {ranks} ranks, {micro_batches} micro-batches",
        f"bubble {found:.3f}, simulated {expected:.3f}",
        f"within {TOLERANCES[ranks]}",
        abs(found - expected) <= TOLERANCES[ranks],
    )


def _gain(quick: bool) -> Finding:
    rounds, ranks = (3 if quick else 7), 4
    times = {family: _in_processes(family, ranks, ranks, rounds).makespan for family in (OneFOneB(), Chimera())}
    spans = {family: float(simulate(family.build(ranks, ranks)).makespan) for family in times}
    found, expected = (each[OneFOneB()] / each[Chimera()] for each in (times, spans))
    return Finding(
        "speed of Chimera over 1F1B, 4 ranks, 4 micro-batches",
        f"{found:.3f}, simulated {expected:.3f}",
        "within 10 %",
        abs(found / expected - 1) <= 0.1,
    )


def _real_compute(quick: bool) -> list[Finding]:
    """Matrix products on two ranks that have a core each: what is measured, beside the simulator; no target."""
    rounds = 10 if quick else 40
    spans = {family: float(simulate(family.build(2, 2)).makespan) for family in (Chimera(), OneFOneB(), GPipe())}
    findings = []
    for other in (OneFOneB(), GPipe()):
        options = {"families": (Chimera(), other), "rounds": rounds}
        first, second = processes.run_pipeline(compare, Topology(2), timeout=280, group_timeout=60, **options)[0]
        findings.append(
            Finding(
                f"speed of Chimera over {other.label}, real compute, 2 ranks, 2 micro-batches",
                f"{Ratio.of(second, first)}, simulated {spans[other] / spans[Chimera()]:.3f}",
            )
        )
    return findings


def compare(transport: Transport, families: tuple[Family, Family], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds per batch with two schedules, in turns."""

    def batch(family: Family) -> Callable[[], float]:
        torch.manual_seed(0)
        net = nn.Sequential(*(Block(512) for _ in range(4)))
        pipeline = Pipeline(net, find_layers(net), [2, 2], family, transport)
        pipeline.partition()
        parts = list(torch.randn(2 * ROWS, 512).chunk(2))

        def run() -> float:
            net.zero_grad()
            transport.barrier()
            start = time.perf_counter()
            pipeline.train(lambda _, part: net(part).square().mean(), parts, [0.5, 0.5])
            seconds = torch.tensor(time.perf_counter() - start)
            transport.all_reduce(seconds, (0, 1), "max").wait()
            return float(seconds)

        for _ in range(3):
            run()
        return run

    return alternate(batch(families[0]), batch(families[1]), rounds)
