"""Who holds which parameter and buffer, by name."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pipe.parameters.holder_map import HolderMap


class Net(nn.Module):
    """Three layers, of which the first and the last share a weight; a scale, a norm and a table outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=number == 1) for number in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.scale, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)
        self.also = nn.Module()
        self.also.weight = self.layers[1].weight


def mapped(module: nn.Module) -> HolderMap:
    layers = [(f"layers.{number}", module.get_submodule(f"layers.{number}")) for number in range(3)]
    return HolderMap(module, layers, [(0,), (1,), (2,)], 3, loss_ranks=(2,))


def test_layers_belong_to_the_ranks_of_their_stages() -> None:
    holders = mapped(Net())
    assert holders.owners("layers.1.bias") == (1,)
    assert holders.owners("layers.0.weight") == holders.owners("layers.2.weight") == (0, 2)
    assert holders.in_layers_alone("layers.2.weight")


def test_what_lies_outside_belongs_to_everyone_until_its_users_are_known() -> None:
    holders = mapped(Net())
    assert all(holders.held_everywhere(name) for name in ("scale", "unused", "norm.weight", "norm.running_mean"))
    assert holders.learn_users([{"scale"}, {"scale", "norm."}, set()]) >= {"scale", "norm."}
    assert holders.owners("scale") == (0, 1)
    assert holders.owners("unused") == (2,)
    assert holders.owners("norm.running_mean") == (1,)


def test_a_parameter_of_a_layer_and_a_module_outside_belongs_to_both() -> None:
    module = Net()
    holders = mapped(module)
    name = holders.name_of(module.layers[1].weight)
    assert name is not None
    assert holders.in_layers_and_outside(name)
    assert holders.held_everywhere(name)
    holders.learn_users([{name}, set(), set()])
    assert holders.owners("also.weight") == holders.owners("layers.1.weight") == (0, 1)


def test_new_tensors_belong_to_the_ranks_with_the_loss_until_corrected() -> None:
    module = Net()
    holders = mapped(module)
    module.average = nn.Linear(2, 2)
    assert not holders.has("average.weight")
    holders.add_new()
    assert holders.has("average.weight")
    assert holders.owners("average.weight") == (2,)
    holders.correct({"average.weight": (0, 1)})
    assert holders.owners("average.weight") == (0, 1)
    holders.give_to_all()
    assert holders.held_everywhere("average.weight")
    assert holders.held_everywhere("layers.1.bias")
