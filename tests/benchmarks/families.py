"""Every synchronous schedule with layers that sleep: the bubble next to the simulator's, and Chimera's gain."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Chimera, Family, GPipe, OneFOneB
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from recipes.reproduce.sleeping import Case, bubbles
from tests.benchmarks.against_torch import Block
from tests.benchmarks.measure import Finding, Ratio, alternate
from tests.support import processes

TOLERANCES = {4: 0.03, 8: 0.05}
UNIT = {4: 0.04, 8: 0.08}
"""Seconds of a rank's forward pass of one micro-batch; its backward pass takes two of them, in two halves."""

ROWS = 512
"""Of a micro-batch with real compute: the tokens of one sequence. Fewer, and adding up the gradients of Chimera's two
copies of the weights takes longer than computing them."""


def run(quick: bool) -> list[Finding]:
    """All families on four ranks, and on eight without ``quick``; then Chimera against 1F1B."""
    warnings.simplefilter("ignore")
    synchronous = [family for family in map(schedules.get, schedules.names()) if family.synchronous]
    findings = []
    for ranks in (4,) if quick else (4, 8):
        cases = [_case(each, 2 * ranks, ranks, quick) for family in synchronous for each in family.variants()]
        found = bubbles(cases, ranks, timeout=1200)
        findings += [_bubble(case, ranks, bubble) for case, bubble in zip(cases, found, strict=True)]
    return [*findings, _gain(quick), *_real_compute(quick)]


def _case(family: Family, micro_batches: int, ranks: int, quick: bool) -> Case:
    return Case(family, micro_batches, UNIT[ranks], 2 * UNIT[ranks], batches=1 if quick else 3)


def _expected(case: Case, ranks: int) -> float:
    costs = Costs(forward=1, backward=2, backward_input=1, backward_weight=1)
    return float(simulate(case.family.build(ranks, case.micro_batches), costs).bubble_ratio)


def _bubble(case: Case, ranks: int, found: float) -> Finding:
    expected = _expected(case, ranks)
    return Finding(
        f"{case.family.label}, {ranks} ranks, {case.micro_batches} micro-batches",
        f"bubble {found:.3f}, simulated {expected:.3f}",
        f"within {TOLERANCES[ranks]}",
        abs(found - expected) <= TOLERANCES[ranks],
    )


def _gain(quick: bool) -> Finding:
    """As much as the bubble is smaller: the work is the same."""
    cases = [_case(family, 4, 4, quick) for family in (OneFOneB(), Chimera())]
    measured, simulated = bubbles(cases, 4), [_expected(case, 4) for case in cases]
    found, expected = ((1 - chimera) / (1 - straight) for straight, chimera in (measured, simulated))
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
