"""Losses and weights of the engine equal those of one plain device, for every model, schedule and size.

`make test` runs every model at a few named points; the full grid is for `make test-all`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from lightning_pipe import schedules
from lightning_pipe.schedules import Chimera
from tests.support.equality_sweep import Point, check
from tests.support.model_zoo import MAIN, SMALL, ZOO, Entry
from tests.support.pairs import slow_but
from tests.support.zoo.base import BATCH

NAMED = [
    Point("gpipe", stages=4, micro_batches=3, steps=2),
    Point("1f1b", stages=2, micro_batches=8, replicas=2, steps=2),
    Point("1f1b", stages=4, micro_batches=1, steps=2),
    Point("interleaved", stages=4, micro_batches=3, replicas=2, steps=2),
    Point("1f1b", stages=4, micro_batches=3, ranks=1, steps=2),
]

FURTHER = [
    Point("zero_bubble", stages=4, micro_batches=4, steps=2),
    Point("dualpipev", stages=4, micro_batches=4, ranks=2, steps=2),
    Point("vhalf", stages=4, micro_batches=3, ranks=2, steps=2),
    Point("looped_bfs", stages=4, micro_batches=3, ranks=2, steps=2),
    Point("interleaved_zero_bubble", stages=4, micro_batches=4, ranks=2, steps=2),
    Point("chimera", stages=4, micro_batches=4, steps=2),
    Point("gems", stages=2, micro_batches=3, replicas=2, steps=2),
    Point("gpipe", stages=4, micro_batches=3, recompute="always", steps=2),
    Point("1f1b", stages=2, micro_batches=3, recompute="except_last", evaluate=True, steps=2),
    Point("1f1b", stages=2, micro_batches=3, replicas=2, accumulate=2, sharded="gradients", steps=2),
    Point("chimera", stages=2, micro_batches=4, replicas=2, sharded="gradients", steps=2),
    Point("interleaved", stages=4, micro_batches=3, replicas=3, sharded=True, steps=2),
    Point(Chimera(scaling="forward_doubling"), stages=2, micro_batches=4, steps=2),
    Point(Chimera(scaling="backward_halving"), stages=2, micro_batches=4, recompute="always", steps=2),
]


def in_turn(entry: Entry, point: Point) -> bool:
    """Every named point with a main model; of the further ones those that no other test has over threads."""
    points = NAMED if point in NAMED else FURTHER
    alone = points is FURTHER and points.index(point) not in (7, 9)
    return MAIN.index(entry) == points.index(point) % len(MAIN) and not alone


def cases(entries: Iterable[Entry], points: Iterable[Point], fast: Callable[[Entry, Point], bool]) -> list[Any]:
    """The points at which each model can equal one device, threads being the ranks."""
    return [
        pytest.param(entry, point, id=f"{entry}-{point}", marks=() if fast(entry, point) else pytest.mark.slow)
        for entry, point in product(entries, points)
        if fits(entry, point)
    ]


def fits(entry: Entry, point: Point) -> bool:
    """Whether a model can equal one device at a point."""
    pipes = schedules.get(point.schedule).pipes > 1
    several = point.replicas > 1 or pipes
    allowed = (entry.replicas or not several) and (entry.pipes or not pipes)
    return entry.threads and allowed and BATCH // point.micro_batches >= entry.fewest


def with_or_without_replicas(entry: Entry, point: Point) -> bool:
    """Every third small model at one point: every second one of them that can have replicas with them."""
    number = SMALL.index(entry)
    return number % 3 == 0 and point is NAMED[1 + number // 2 % 2 * 2 if entry.replicas and number % 2 == 0 else 0]


CASES = [
    *cases(MAIN, [*NAMED, *FURTHER], in_turn),
    *cases(SMALL, [NAMED[0], NAMED[1], NAMED[3], *FURTHER], with_or_without_replicas),
]


@pytest.mark.parametrize(("entry", "point"), CASES)
def test_models(entry: Entry, point: Point) -> None:
    check(entry, point)


def test_booleans_cross_cuts_of_stages_that_compute_again() -> None:
    check(ZOO["structures"], Point("gpipe", stages=4, micro_batches=3, recompute="always", steps=1))


@pytest.mark.parametrize(
    "name", slow_but(["mlp", "residual", "bert", "t5", "sequence_lengths", "structures"], "structures")
)
@pytest.mark.parametrize("schedule", slow_but(["1f1b", "gpipe", "interleaved"], "1f1b"))
def test_evaluation_between_training_steps_changes_nothing(name: str, schedule: str) -> None:
    point = Point(schedule, stages=4, micro_batches=3, evaluate=True)
    check(ZOO[name], point)
    # gradients that are still being accumulated are left alone, too
    check(ZOO[name], replace(point, stages=2, accumulate=2, steps=2))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("entry", ZOO.values(), ids=str)
def test_everything(entry: Entry, schedule: str, stages: int) -> None:
    """All numbers of micro-batches and of replicas in one test: whoever collects the fast ones collects this too."""
    for micro_batches, replicas in product((1, 3, 8), (1, 2)):
        point = Point(schedule, stages, micro_batches, replicas)
        if fits(entry, point):
            check(entry, point)
