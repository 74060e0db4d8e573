"""Every synchronous schedule with layers that sleep: the bubble next to the simulator's, and Chimera's gain."""

from __future__ import annotations

import warnings
from functools import partial

from lightning_pipe import schedules
from lightning_pipe.profiling.processes import in_processes
from lightning_pipe.schedules import Chimera, Family, GPipe, OneFOneB
from lightning_pipe.simulate import Costs, simulate
from recipes.reproduce.sleeping import Case, measure
from tests.benchmarks.measure import Finding

TOLERANCES = {4: 0.03, 8: 0.05}
UNIT = {4: 0.04, 8: 0.08}
"""Seconds of a rank's forward pass of one micro-batch; its backward pass takes two of them, in two halves."""


def run(quick: bool) -> list[Finding]:
    """All families on four ranks, and on eight without ``quick``; then Chimera against 1F1B."""
    warnings.simplefilter("ignore")
    synchronous = [family for family in map(schedules.get, schedules.names()) if family.synchronous]
    findings = []
    for ranks in (4,) if quick else (4, 8):
        cases = [_case(each, 2 * ranks, ranks, quick) for family in synchronous for each in family.variants()]
        if ranks == 4:  # whose formula everybody knows, with fewer micro-batches and with more
            cases += [_case(family, number, ranks, quick) for family in (GPipe(), OneFOneB()) for number in (4, 16)]
        found = in_processes(partial(measure, cases=cases), ranks, "cpu", timeout=1200)
        findings += [_bubble(case, ranks, bubble) for case, bubble in zip(cases, found, strict=True)]
    return [*findings, _gain(quick)]


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
    measured = in_processes(partial(measure, cases=cases), 4, "cpu", timeout=600)
    simulated = [_expected(case, 4) for case in cases]
    found, expected = ((1 - chimera) / (1 - straight) for straight, chimera in (measured, simulated))
    return Finding(
        "speed of Chimera over 1F1B, 4 ranks, 4 micro-batches",
        f"{found:.3f}, simulated {expected:.3f}",
        "within 10 %",
        abs(found / expected - 1) <= 0.1,
    )
