"""What runs on the engine, in small: update rules, batch norm, layers that sleep, curves, held activations."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import THOROUGH
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.transport.topology import Topology
from recipes import config
from recipes.reproduce import parity, ran_bubbles, sleeping
from recipes.reproduce.held_activations import NAMES, count
from recipes.reproduce.sleeping import Case, measure
from recipes.reproduce.update_rules import batch_norm, rules
from tests.support.threads import run_threads, thread_world


def test_update_rules() -> None:
    rows = rules(ranks=2, batches=3, tolerance="1e-12").rows
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
    names = (parity.ONE_DEVICE, parity.MICRO_BATCHED, "chimera", "pipedream")
    whole, halves, chimera, pipedream = (parity.train(given, data, name, 2, 2) for name in names)
    assert halves != pytest.approx(whole, abs=1e-3)  # batch norm treats the halves apart
    assert chimera == pytest.approx(halves, abs=1e-3)
    assert len(pipedream) == 2


def test_parity_has_a_row_for_every_run() -> None:
    ends = {
        parity.ONE_DEVICE: [[3.0, 2.0]],
        parity.MICRO_BATCHED: [[3.0, 2.5]],
        "gpipe": [[3.0, 2.5]],
        "pipedream": [[3.0, 2.9]],
    }
    rows = list(parity._rows("Net", ends, ["gpipe"], "0.01"))
    assert [row.verdict for row in rows] == ["shown", "shown", "reproduced", "shown"]
    assert [row.reproduced for row in rows[1:]] == pytest.approx([0.25, 0.0, 0.45])
