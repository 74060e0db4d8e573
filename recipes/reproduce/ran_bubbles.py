"""Bubbles of the running engine beside the formulas: Chimera's Table 2, and the schedules that came later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

from lightning_pipe import schedules
from lightning_pipe.profiling.processes import in_processes
from lightning_pipe.schedules import Family, Interleaved, InterleavedZeroBubble, ZeroBubble
from lightning_pipe.simulate import Costs, simulate
from recipes.reproduce.bubbles import SCHEMES, value
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, near
from recipes.reproduce.sleeping import Case, measure

BUSY = "measured with processes that sleep: a machine that is busy with something else wakes them late"


def table2(ranks: Sequence[int], unit: float, batches: int) -> Result:
    """Table 2 measured.

    Args:
        ranks: numbers of stages, each on a process of its own.
        unit: seconds of a forward pass; a backward pass takes as long. With GEMS half of it, and a backward pass the
            whole; with PipeDream, whose messages nothing hides, twice as long.
        batches: measured ones, of which the median counts.
    """
    rows: list[Row] = []
    for depth in ranks:
        cases, labels = [], []
        for scheme, family in SCHEMES.items():
            for number in _numbers(scheme, depth):
                forward = {"GEMS": unit / 2, "PipeDream": 2 * unit}.get(scheme, unit)
                cases.append(Case(family, number, forward, 2 * forward if scheme == "GEMS" else forward, batches))
                labels.append((scheme, number))
        found = in_processes(partial(measure, cases=cases), depth, "cpu", timeout=600)
        rows += [_row(*label, depth, each) for label, each in zip(labels, found, strict=True)]
    return Result.of(rows)


def _numbers(scheme: str, depth: int) -> list[int]:
    if scheme == "PipeDream":
        return [1]
    if scheme == "2BW" or depth > 4:
        return [depth]
    return [2 * depth] if scheme == "GEMS" else [depth, 2 * depth]


def _row(scheme: str, number: int, depth: int, found: float) -> Row:
    formula = published("chimera", "Table 2")[scheme]["bubble"]
    limit = "; the limit of many micro-batches" if scheme == "GEMS" else ""
    what, bubble = f"{scheme}, D={depth}, N={number}", float(value(formula, D=depth, N=number))
    note = f"{formula}{limit}; {BUSY}"
    return near(what, bubble, found, note=note) if bubble else Row(what, bubble, found, "0.03", note=note)


def later(ranks: int, micro_batches: int, unit: float, batches: int, names: Sequence[str]) -> Result:
    """The other schedules: against the simulator, and where a formula is published, that.

    Args:
        ranks: of the pipeline.
        micro_batches: of a batch.
        unit: seconds of a rank's forward pass; its backward pass takes two of them, in two halves.
        batches: measured ones, of which the median counts.
        names: of the schedules.
    """
    variants = [variant for name in names for variant in schedules.get(name).variants()]
    cases = [Case(each, micro_batches, unit, 2 * unit, batches) for each in variants]
    found = in_processes(partial(measure, cases=cases), ranks, "cpu", timeout=600)
    return Result.of(list(_later(variants, found, ranks, micro_batches)))


def _later(variants: list[Family], found: list[float], ranks: int, number: int) -> Iterator[Row]:
    costs = Costs(forward=1, backward=2, backward_input=1, backward_weight=1)
    for family, bubble in zip(variants, found, strict=True):
        simulated = float(simulate(family.build(ranks, number), costs).bubble_ratio)
        formula = _formula(family, ranks, number)
        note = f"simulated {simulated:.4g}; {BUSY}"
        yield near(f"{family.label}, p={ranks}, m={number}", formula, bubble, note=note)


def _formula(family: Family, ranks: int, number: int) -> float | None:
    """Of the total time, for the schedules whose papers give one with a flush."""
    if family.name == "naive":
        return float(Fraction(ranks - 1, ranks))
    if not isinstance(family, Interleaved) and family != ZeroBubble("h1"):
        return None
    share = 3 if isinstance(family, InterleavedZeroBubble | ZeroBubble) else 1  # what is idle is one part of three
    ideal = Fraction(ranks - 1, share * family.stages_per_rank * number)
    return float(ideal / (1 + ideal))
