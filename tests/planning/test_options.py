"""What a plan is made for: options that cannot be are refused with their numbers, and the public function has all."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_pipe import CostProfile, plan, search
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import SizeCosts
from lightning_pipe.planning.layer_sizes import without_times
from lightning_pipe.planning.options import PlanOptions, SearchOptions


@pytest.mark.parametrize(("function", "options"), [(plan, PlanOptions), (search, SearchOptions)])
def test_the_public_functions_take_the_options(function: Any, options: Any) -> None:
    first, *arguments = inspect.signature(function).parameters.values()
    assert first.name in ("module", "costs")
    assert [(each.name, each.default) for each in arguments] == [
        (each.name, inspect.Parameter.empty if each.default is MISSING else each.default) for each in fields(options)
    ]


def test_a_limit_may_have_a_unit() -> None:
    assert SearchOptions(4, 8, memory="16GiB").limit == 16 * 2**30
    assert SearchOptions(4, 8, memory=1e9).limit == SearchOptions(4, 8, memory="1GB").limit == 1e9
    with pytest.raises(ConfigurationError, match="'plenty' is not a size such as 16GiB"):
        search(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, 8, memory="plenty")


def test_a_profile_may_be_named_by_its_file(tmp_path: Path) -> None:
    costs = SizeCosts((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (0.0,) * 4, (0.0,) * 4)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    profile = CostProfile("Sequential", without_times(net, find_layers(net)).layers, {1: costs})
    profile.save(tmp_path / "net.json")
    by_file = plan(net, ranks=2, batch=16, profile=tmp_path / "net.json")
    assert str(by_file) == str(plan(net, ranks=2, batch=16, profile=profile))


@pytest.mark.parametrize("none", [{"ranks": 0}, {"batch": 0}, {"accumulation": 0}, {"replicas": -1}, {"nodes": 0}])
def test_there_is_one_of_everything(none: dict[str, int]) -> None:
    ((name, number),) = none.items()
    with pytest.raises(ConfigurationError, match=f"needs {name} of 1 or more, not {name}={number}"):
        PlanOptions(**{"ranks": 2, "batch": 8, **none})


def test_processes_are_divided_over_nodes() -> None:
    topology = PlanOptions(4, 8, replicas=2, nodes=2).topology(3)
    assert len(topology.nodes) == 2
    with pytest.raises(ConfigurationError, match="4 ranks x 2 replicas = 8 processes cannot be divided over 3 nodes"):
        PlanOptions(4, 8, replicas=2, nodes=3).topology(3)


def test_batches_of_replicas_add_up() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    batch = plan(net, ranks=2, batch=8, replicas=3, accumulation=2).batch
    assert batch is not None
    assert batch.global_batch == 48


def test_several_passes_are_planned_as_they_run() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    once, twice = (plan(net, ranks=2, batch=16, micro_batches=4, passes=passes) for passes in (1, 2))
    interleaved = plan(net, ranks=2, batch=16, micro_batches=4, schedule="interleaved")
    assert twice.bubble == interleaved.bubble
    assert twice.bubble != once.bubble
    assert twice.schedule == "1f1b in 2 passes"
    # the stages and what they hold are those of one pass
    assert (twice.stages, twice.memory) == (once.stages, once.memory)


@pytest.mark.parametrize(("options", "words"), [({"passes": 0}, "passes=0"), ({"passes": 2, "profile": 1}, "profile")])
def test_passes_that_cannot_be_planned(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PlanOptions(2, 16, **options)
