"""What runs on the engine, in small: update rules, batch norm, layers that sleep, curves, memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.batch import THOROUGH
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.transport.topology import Topology
from recipes import config
from recipes.errors import RecipeError
from recipes.reproduce import parity, ran_bubbles, sleeping
from recipes.reproduce.held_activations import NAMES, count
from recipes.reproduce.one_device_memory import MIB, largest, measured, peak_bytes
from recipes.reproduce.sleeping import Case, measure
from recipes.reproduce.update_rules import batch_norm, rules
from tests.support.processes import run_trainers
from tests.support.threads import run_threads, thread_world


def test_update_rules() -> None:
    rows = rules(ranks=2, batches=6, tolerance="1e-12").rows
    assert {row.verdict for row in rows} == {"reproduced"}
    assert len(rows) > 10


def test_batch_norm() -> None:
    *rows, without = batch_norm(samples=6, micro_batches=[4], tolerance="1e-12").rows
    assert {row.verdict for row in rows} == {"reproduced"}
    assert isinstance(without.reproduced, float)
    assert without.reproduced > 1e-3, "the statistics of micro-batches are others"


def test_every_kind_of_schedule_sleeps() -> None:
    """The share of time in which no layer sleeps is between nothing and all of it; how large is not tested."""
    cases = [Case(schedules.get(name), 2, 0.002, 0.004, 1) for name in ("1f1b", "interleaved", "pipedream_2bw")]
    found = run_threads(thread_world(Topology(2)), lambda transport: measure(transport, cases), timeout=60)
    assert found[0] == found[1]
    assert all(0 < bubble < 1 for bubble in found[0])


def test_the_first_batches_in_which_more_is_compared_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = itertools.count(1)

    class Pipeline:
        def train(self, *_: Any) -> None:
            (time.sleep if next(batches) <= THOROUGH else sleeping.sleep)(0.02)

    monkeypatch.setattr(sleeping, "_pipeline", lambda *_: (Pipeline(), nn.Sequential(), [None]))
    case = Case(schedules.get("1f1b"), 1, 0, 0, batches=1)
    ((bubble,),) = run_threads(thread_world(Topology(1)), lambda transport: measure(transport, [case]), timeout=60)
    assert next(batches) == 1 + THOROUGH + 1
    assert bubble < 0.9, "the layers of the last batch sleep"


@pytest.mark.parametrize("name", ["naive", "interleaved", "looped_bfs", "zero_bubble", "interleaved_zero_bubble"])
def test_the_formulas_beside_what_sleeps_are_simulated(name: str) -> None:
    family = schedules.get(name)
    bubble = simulate(family.build(4, 8), Costs(1, 2, 1, 1)).bubble_ratio
    assert ran_bubbles._formula(family, 4, 8) == pytest.approx(float(bubble))


def test_what_the_engine_holds() -> None:
    families = [schedules.get(name) for name in NAMES.values()]
    found = run_threads(thread_world(Topology(4)), lambda transport: count(transport, families, 8), timeout=60)
    assert found == [[4, 4, 3, 2]] * 4


def test_a_pipeline_trains_as_one_device() -> None:
    small = ["model.width=4", "model.blocks=[1,1,1,1]", "data.batch_size=16"]
    given = config.composed(["experiment=resnet101_imagenet", "data.source=digits", "optim.lr=1e-3", *small])
    data = parity.batches(given, 2)
    alone = {number: parity.train(given, data, parity.MICRO_BATCHED, 2, number) for number in (1, 2)}
    assert alone[1] == parity.train(given, data, parity.ONE_DEVICE, 2, 1)
    assert alone[2] != pytest.approx(alone[1], abs=1e-3)  # batch norm treats the halves apart
    for name, number in {"gpipe": 1, "interleaved": 2, "chimera": 2}.items():
        assert parity.train(given, data, name, 2, number) == pytest.approx(alone[number], abs=1e-3)
    assert len(parity.train(given, data, "pipedream", 2, 1)) == 2


def test_the_largest_size_below_a_limit() -> None:
    assert largest(lambda size: (size, size * MIB), 10.5, 2, 20, 1) == (10, 10, 10 * MIB)
    assert largest(lambda size: (size, size * MIB), 10.5, 4, 20, 4) == (8, 8, 8 * MIB)
    for range_ in ((11, 20), (2, 10)):
        with pytest.raises(RecipeError, match="not between a size of"):
            largest(lambda size: (size, size * MIB), 10.5, *range_, 1)


def forked(**options: Any) -> tuple[int, int]:
    """In a process that has torch already."""
    found: tuple[int, int] = run_trainers(_peak, 1, options=options)[0]
    return found


def _peak(process: int, options: dict[str, Any]) -> tuple[int, int]:
    return peak_bytes(**options)


@pytest.mark.parametrize("way", [forked, pytest.param(measured, marks=pytest.mark.slow)])
def test_recomputation_needs_less_memory(way: Callable[..., tuple[int, int]]) -> None:
    # in processes of their own: this one may have memory to spare
    options: dict[str, Any] = {"kind": "transformer", "size": 6, "batch": 16, "length": 64, "vocabulary": 16}
    options |= {"width": 64, "inner": 256, "heads": 2}
    parameters, naive = way(micro_batches=0, **options)
    same, recomputed = way(micro_batches=16, **options)
    assert parameters == same > 0
    assert naive > recomputed
