"""Layers balanced by how much they compute, counted on the module's example."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import plan
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import divide, find_layers, layer_flops


class Narrowing(nn.Module):
    """Each layer has more channels and a smaller image: the first compute most, the last hold most parameters."""

    def __init__(self, *, example: bool = True) -> None:
        super().__init__()
        sizes = [3, 8, 16, 32, 64]
        self.net = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.MaxPool2d(4))
                for before, after in pairwise(sizes)
            )
        )
        self.example_input_array = torch.zeros(1, 3, 256, 256) if example else None

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.net(images)
        return result


def test_operations_are_those_of_the_formula() -> None:
    module = Narrowing()
    layers = [(f"net.{number}", layer) for number, layer in enumerate(module.net)]
    expected = [2 * 9 * i * o * side**2 for i, o, side in ((3, 8, 256), (8, 16, 64), (16, 32, 16), (32, 64, 4))]
    assert layer_flops(module, layers) == expected
    assert divide(module, layers, 2, "parameters") == [3, 1]
    assert divide(module, layers, 2, "flops") == [1, 3]


def test_counting_leaves_the_module_as_it_was() -> None:
    module = Narrowing().train()
    module.net[1].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    layer_flops(module, [(f"net.{number}", layer) for number, layer in enumerate(module.net)])
    assert [part.training for part in module.net] == [True, False, True, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in module.net)


class Shared(nn.Module):
    """One embedding under two names, and its matrix once more as that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.target_embedding = self.embedding
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.output = nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.norm = self.last_norm = nn.BatchNorm1d(4)
        self.example_input_array = torch.zeros(2, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embedding(tokens) + self.target_embedding(tokens)
        for layer in self.layers:
            states = layer(states)
        return self.output(self.last_norm(self.norm(states)))


def test_counting_leaves_what_a_module_has_under_two_names() -> None:
    module = Shared()
    before = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    assert layer_flops(module, find_layers(module, "layers")) == [2 * 2 * 4 * 4] * 2 + [2 * 2 * 4 * 4 + 2 * 2 * 4 * 10]
    after = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    assert all(then is now for (_, then), (_, now) in zip(before, after, strict=True))


def test_what_is_computed_beside_the_layers_counts_with_a_neighbour() -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.head = nn.Linear(8, 4), nn.Linear(4, 100)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.example_input_array = {"x": torch.zeros(5, 8)}

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            for layer in self.layers:
                x = layer(x)
            result: Tensor = self.head(x)
            return result

    with torch.device("meta"):
        module = Headed()
    assert layer_flops(module, find_layers(module, "layers")) == [5 * 2 * (8 * 4 + 16), 5 * 2 * 16, 5 * 2 * (16 + 400)]


def test_what_cannot_be_counted_is_told() -> None:
    module = Narrowing(example=False)
    layers = find_layers(module)
    with pytest.raises(ConfigurationError, match="the module has none"):
        divide(module, layers, 2, "flops")
    module.example_input_array = torch.zeros(7)
    with pytest.raises(ConfigurationError, match="cannot be counted on its example: "):
        divide(module, layers, 2, "flops")
    assert module.training


def test_a_plan_is_balanced_by_operations() -> None:
    with torch.device("meta"):
        module = Narrowing()
    layers = ["net.0.0", "net.1.0", "net.2.0", "net.3.0"]
    by = {balance: plan(module, 2, batch=8, layers=layers, balance=balance) for balance in ("parameters", "flops")}
    counts = {balance: [len(stage.layers) for stage in made.stages] for balance, made in by.items()}
    assert counts == {"parameters": [3, 1], "flops": [1, 3]}
    assert "balanced by flops" in str(by["flops"])
