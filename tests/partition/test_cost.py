"""What layers cost by their parameters, a list or a function, and the division that follows."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.partition import divide, find_layers, parameter_costs, places_by_stage
from lightning_pipe.partition.cost import Balance


def widths(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_divides_by_parameters() -> None:
    net = widths(8, 1, 1, 1, 5)
    assert divide(net, find_layers(net), 2) == [1, 4]
    assert divide(net, find_layers(net), 3) == [1, 3, 1]


def test_parameters_outside_are_charged_to_their_neighbours() -> None:
    model = Tied()
    # the tied weight is held at both ends, the norm at the last
    assert parameter_costs(model, find_layers(model, "layers")) == [24, 4, 28]


def test_outside_parameters_between_two_stacks() -> None:
    model = nn.ModuleDict(
        {"a": nn.ModuleList([nn.Linear(2, 2)]), "e": nn.Embedding(5, 2), "b": nn.ModuleList([nn.Linear(2, 2)])}
    )
    assert parameter_costs(model, find_layers(model, ["a", "b"])) == [6, 16]


def test_a_shared_parameter_is_charged_to_the_first_layer() -> None:
    net = widths(4, 4, 2)
    net[1].weight = net[0].weight
    assert parameter_costs(net, find_layers(net)) == [4, 0, 2]


def test_a_module_used_between_layers_is_charged_once_per_place() -> None:
    shared = nn.Linear(4, 4, bias=False)
    net = nn.Sequential(
        nn.Linear(4, 4, bias=False), shared, nn.Linear(4, 4, bias=False), shared, nn.Linear(4, 4, bias=False)
    )
    assert parameter_costs(net, find_layers(net)) == [16, 32, 32]


def test_lazy_parameters_cost_nothing_yet() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4, bias=False))
    assert parameter_costs(net, find_layers(net)) == [0, 16]


def test_divides_by_a_list() -> None:
    net = widths(1, 1, 1, 1, 1)
    assert divide(net, find_layers(net), 2, [4, 1]) == [4, 1]
    assert divide(net, find_layers(net), 2, (1, 4)) == [1, 4]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 2], r"2 \+ 2 = 4, but there are 5 layers(?s:.*)balance=\[2, 3\]"),
        ([2, 2, 1], r"for 3 stages, but there are 2 stages(?s:.*)balance=\[2, 3\]"),
        ([5, 0], "at least 1"),
        ([2.5, 2.5], "whole number"),
        ([True, 4], "whole number"),
        ([], "for 0 stages"),
    ],
)
def test_a_wrong_list_gets_a_line_to_paste(counts: list[int], message: str) -> None:
    net = widths(1, 1, 1, 1, 1)
    with pytest.raises(PartitionError, match=message):
        divide(net, find_layers(net), 2, counts)


def test_divides_by_a_function() -> None:
    net = widths(1, 1, 1, 9)
    assert divide(net, find_layers(net), 2, lambda layer: 1.0) == [2, 2]
    assert divide(net, find_layers(net), 2, lambda layer: float(layer.in_features)) == [3, 1]


@pytest.mark.parametrize("value", [-1, float("nan"), "2", None, torch.tensor(1.0)])
def test_a_wrong_cost_names_the_layer(value: object) -> None:
    net = widths(1, 1)
    with pytest.raises(PartitionError, match=r"for layer '0' \(Linear\)"):
        divide(net, find_layers(net), 2, lambda layer: value)  # type: ignore[arg-type,return-value]


def test_fewer_layers_than_stages() -> None:
    net = widths(1, 1, 1)
    with pytest.raises(PartitionError, match=r"3 layers \(0, 1, 2\) cannot fill 4 stages(?s:.*)stages=3 or fewer"):
        divide(net, find_layers(net), 4)


def test_fewer_layers_than_stages_names_the_finer_sequence() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    model = nn.ModuleDict({"stages": nn.ModuleList(Stage() for _ in range(2))})
    finer = ["stages.0.layers.*", "stages.1.layers.*"]
    with pytest.raises(PartitionError, match=rf"one after the other: layers={re.escape(str(finer))}"):
        divide(model, find_layers(model, "stages"), 4)
    assert len(find_layers(model, finer)) == 6


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_costs_that_were_not_measured(balance: Balance) -> None:
    net = widths(1, 1)
    with pytest.raises(ConfigurationError, match=rf'{balance}(?s:.*)balance="parameters"'):
        divide(net, find_layers(net), 2, balance)


def test_an_unknown_word() -> None:
    net = widths(1, 1)
    with pytest.raises(ConfigurationError, match="'size' is unknown"):
        divide(net, find_layers(net), 2, "size")  # type: ignore[arg-type]


def test_what_every_stage_holds() -> None:
    model = Tied()
    first, last = places_by_stage(model, find_layers(model, "layers"), [1, 2])
    assert [held.name for held in first] == ["embedding.weight", "layers.0.weight"]
    assert [held.name for held in last] == [
        "embedding.weight",
        "layers.1.weight",
        "layers.2.weight",
        "norm.weight",
        "norm.bias",
    ]
    net = widths(4, 4, 4)
    net[2].weight = net[0].weight
    assert [[h.name for h in stage] for stage in places_by_stage(net, find_layers(net), [1, 1, 1])] == [
        ["0.weight"],
        ["1.weight"],
        ["0.weight"],
    ]
