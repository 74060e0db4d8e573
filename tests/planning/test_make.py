"""Plans of modules whose layers have been measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_pipe import plan
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import CostProfile, SizeCosts
from lightning_pipe.planning.layer_sizes import without_times
from lightning_pipe.text import memory


@pytest.mark.parametrize(
    ("ranks", "schedule", "expected"), [(1, "gpipe", [(0,)] * 4), (2, "1f1b", [(1,), (1,), (0,), (0,)])]
)
def test_a_plan_has_as_many_stages_as_a_run(ranks: int, schedule: str, expected: list[tuple[int, ...]]) -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    planned = plan(module, ranks=ranks, batch=8, stages=4, schedule=schedule)
    assert [stage.ranks for stage in planned.stages] == expected
    assert {len(stage.layers) for stage in planned.stages} == {2}


def test_a_plan_with_measured_costs_counts_activations_and_unequal_stages() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    layers = without_times(net, find_layers(net)).layers
    forward = (1.0, 1.0, 3.0, 3.0)
    costs = SizeCosts(forward, tuple(2 * each for each in forward), forward, (1000.0,) * 4, (0.0,) * 4)
    profile = CostProfile("Sequential", layers, {1: costs})
    plain, measured = (plan(net, 2, batch=8, micro_batches=8, balance=[2, 2], profile=each) for each in (None, profile))
    assert plain.bubble == pytest.approx(1 / 9)
    # stage 1 is three times as slow: 8 x 18 seconds of work, and stage 0 before and after it
    assert measured.bubble == pytest.approx(1 - 8 * (6 + 18) / (2 * (8 * 18 + 6)))
    # 1F1B holds two micro-batches on the first stage and one on the last, each of two layers
    assert [b.bytes - a.bytes for a, b in zip(plain.stages, measured.stages, strict=True)] == [4000, 2000]
    balanced = plan(net, 2, batch=8, balance="time", profile=profile)
    assert [len(stage.layers) for stage in balanced.stages] == [3, 1]
    with pytest.raises(ConfigurationError, match="has not been measured"):
        plan(net, 2, batch=8, balance="time")
    with pytest.raises(ConfigurationError, match="of another module"):
        plan(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), 2, batch=8, profile=profile)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev", "chimera", "interleaved"])
def test_a_rank_with_both_layers_of_a_tied_parameter_holds_it_once(schedule: str) -> None:
    """DualPipeV has the first and the last stage on one rank, Chimera on each of two."""
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    net[3].weight = net[0].weight
    costs = SizeCosts((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (0.0,) * 4, (0.0,) * 4)
    profile = replace(without_times(net, find_layers(net)), sizes={1: costs})
    plain, measured = (
        plan(net, 2, batch=8, micro_batches=4, schedule=schedule, profile=each) for each in (None, profile)
    )
    assert [one.step for one in measured.memory] == [one.step for one in plain.memory]


def test_a_rank_never_holds_the_most_of_all_its_stages_at_once() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    costs = SizeCosts((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (1e6,) * 4, (0.0,) * 4)
    profile = CostProfile("Sequential", without_times(net, find_layers(net)).layers, {1: costs})
    found = plan(net, 2, batch=8, micro_batches=8, schedule="interleaved", profile=profile)
    # 1F1B with two stages on a rank holds five micro-batches on rank 0 and three on rank 1
    held = (5e6 + 16 * 144, 3e6 + 16 * 144)
    own = plan(net, 2, batch=8, micro_batches=8, schedule="interleaved")
    assert [one.step for one in own.memory] == [16 * 144, 16 * 144]
    assert [one.step for one in found.memory] == list(held)[::-1]  # process 0 has the loss
    text = " ".join(str(found).split())
    assert f"{memory(held[1])} on the device from the first step on" in text
