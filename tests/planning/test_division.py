"""What plans say of parameters that several processes divide, beside what a run has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe import plan, search
from lightning_pipe.config import Sharding
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import CostProfile, LayerSizes, SizeCosts
from lightning_pipe.planning.division import Division
from lightning_pipe.planning.layer_sizes import without_times
from lightning_pipe.simulate import Link
from tests.planning.test_search import MIB
from tests.planning.test_search import profile as profile_of
from tests.support.held_bytes import POINTS, RANKS, Llama, planned, train
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("replicas", "tensor", "sharding"),
    slow_but(POINTS, (2, 1, "parameters")),
)
def test_each_process_has_what_the_plan_says(replicas: int, tensor: int, sharding: Sharding) -> None:
    """Parameters, gradients and optimizer state, to the byte, in three dimensions."""
    with torch.device("meta"):
        module = Llama()
    made = planned(module, replicas, tensor, sharding)
    numbers = {"replicas": replicas, "tensor": tensor, "sharding": sharding}
    measured, printed = zip(*run_trainers(train, RANKS * replicas * tensor, timeout=100, **numbers), strict=True)
    assert [tuple(map(int, each.held)) for each in made.memory] == [tuple(map(int, each)) for each in measured]
    assert _lines_of_processes(printed[0]) == _lines_of_processes(str(made)), "the run's own plan"


def _lines_of_processes(text: str) -> list[str]:
    return re.findall(r"rank \d+: .* to build, (.*) from the first step on", text)


def test_a_rank_knows_its_own_parts_and_all_know_them_together() -> None:
    own = [
        Division("parameters", {"a": 2}, frozenset({"b", "tied"})),
        Division("parameters", {}, frozenset({"a", "tied"})),
    ]
    assert Division.of_all(own) == Division("parameters", {"a": 2}, frozenset({"tied"}))


def test_what_transformers_do_not_say_is_guessed_and_said() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))
    made = plan(net, 2, 8, tensor_parallel_size=2)
    # of a layer 64 numbers are divided, and 8 + 16 are not: values, gradients, and two moments
    assert [each.step for each in made.memory] == [4 * 4 * (64 // 2 + 24)] * 4
    assert "their matrices are taken for divided" in " ".join(str(made).split())
    assert "2 ranks in a pipeline x 1 replica x 2 tensor ranks" in str(made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_optimizer": True, "tensor_parallel_size": 2}, "has parts of them"),
        ({"shard_optimizer": "parameters", "schedule": "chimera"}, "two ranks"),
        ({"tensor_parallel_size": 2, "schedule": "pipedream"}, "versions of the weights"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
    ],
)
def test_what_a_run_refuses_is_not_planned(options: dict[str, Any], words: str) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(ConfigurationError, match=words):
        plan(net, 2, 8, **options)


def test_what_several_layers_have_stays_whole_on_each_replica() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    net[3].weight = net[0].weight
    divided, alone = 8 * 8 * 4, 8 * 8 * 4
    costs = SizeCosts((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (0.0,) * 4, (0.0,) * 4)
    profile = replace(without_times(net, find_layers(net)), sizes={1: costs})
    for made in (
        plan(net, 2, 8, replicas=2, shard_optimizer="parameters", balance=[2, 2]),
        plan(net, 2, 8, replicas=2, shard_optimizer="parameters", balance=[2, 2], profile=profile),
    ):
        assert made.stages[0].bytes == 4 * alone + divided * (1 + 1 / 2 + 1 + 2 / 2)
        assert made.memory[0].step == made.stages[1].bytes == made.stages[0].bytes


def test_costs_of_tensor_ranks() -> None:
    """By hand: half of the work, and two sums of a MiB each way, of 2 us latency and 1e-9 s per byte."""
    whole = SizeCosts((0.4, 0.2), (0.8, 0.4), (0.3, 0.1), (8.0 * MIB, 4.0 * MIB), (1.0 * MIB, 0.0))
    layers = (LayerSizes("0", 10, 40), LayerSizes("1", 10, 40, 40))
    found = CostProfile("Net", layers, {1: whole}, all_reduce=Link(1e-6, 1e-9)).over_tensor_ranks(2)
    sums, part = 2 * (2e-6 + MIB * 1e-9), found.sizes[1]
    assert part.forward == pytest.approx((0.2 + sums, 0.1 + sums))
    assert part.backward == pytest.approx((0.4 + sums, 0.2 + sums))
    assert part.backward_weight == pytest.approx((0.15, 0.05))
    # what layers hand on is whole on each tensor rank
    assert part.saved_bytes == pytest.approx((4.5 * MIB, 2.5 * MIB))
    assert part.boundary_bytes == whole.boundary_bytes
    assert [(each.parameters, each.parameter_bytes, each.frozen_bytes) for each in found.layers] == [
        (10, 20, 0),
        (10, 20, 20),
    ]


def test_tensor_ranks_are_searched() -> None:
    given: dict[str, Any] = {"ranks": 8, "global_batch": 32, "tensor_parallel_size": 2}
    found = search(profile_of(16), **given)
    for choice in found.choices:
        one = choice.configuration
        assert one.ranks * one.replicas * one.tensor == 8
        assert one.family.pipes == 1
        assert choice.options["tensor_parallel_size"] == 2
    tight = search(profile_of(16), **given, memory=0.5 * found.best.bytes)
    shardings = {choice.configuration.shard_optimizer for choice in tight.choices}
    assert shardings <= {False, "parameters"}
    assert "parameters" in shardings
    assert "x 2 tensor ranks" in found.best.configuration.label
    with pytest.raises(ConfigurationError, match="not divisible by tensor_parallel_size=3"):
        search(profile_of(16), **{**given, "tensor_parallel_size": 3})
    with pytest.raises(ConfigurationError, match="two ranks"):
        search(profile_of(16), **given, families=["chimera"])
