"""Recorded tensors that meet ordinary ones: assigned to them, or written to in one call with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.construction import deferred_init, materialize
from lightning_pipe.patches import replacements
from tests.construction.test_deferred import WIDE, assert_same, built_both_ways, linear


def from_numpy() -> Tensor:
    """A tensor that has memory in a construction too."""
    return torch.from_numpy(torch.ones(WIDE, WIDE).numpy().copy())


class Mixed(nn.Module):
    """Parameters and buffers with and without memory."""

    def __init__(self, then: Callable[[Mixed], object] = lambda module: None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDE, WIDE))
        self.small = nn.Parameter(torch.ones(3))
        self.ordinary = nn.Parameter(from_numpy())
        self.register_buffer("buffer", torch.rand(WIDE, WIDE))
        self.norm = nn.BatchNorm1d(50 * WIDE)
        then(self)


def assigned(value: Callable[[Mixed], Tensor]) -> Callable[[Mixed], object]:
    def assign(module: Mixed) -> None:
        module.small.data = value(module)
        with torch.no_grad():
            module.weight.mul_(2)
            module.buffer.mul_(3)

    return assign


def without_gradients(function: Callable[[Mixed], object]) -> Callable[[Mixed], object]:
    return torch.no_grad()(function)


MIXED: dict[str, Callable[[Mixed], object]] = {
    "detach": assigned(lambda module: module.weight.detach()),
    "data": assigned(lambda module: module.weight.data),
    "converted": assigned(lambda module: module.weight.detach().half()),
    "slice": assigned(lambda module: module.weight.detach()[2:5]),
    "transposed": assigned(lambda module: module.weight.detach().t()),
    "buffer": assigned(lambda module: module.buffer),
    "its value has been read": assigned(lambda module: (module.buffer.sum().item(), module.buffer)[1]),
    "set_": without_gradients(lambda module: (module.small.set_(module.weight), module.weight.mul_(2))),
    "set_ of a storage": without_gradients(
        lambda module: (module.small.set_(module.weight.untyped_storage(), 0, (2, 2), (2, 1)), module.weight.mul_(2))
    ),
    "swap_tensors": lambda module: torch.utils.swap_tensors(module.small, module.weight),
    "Parameter": lambda module: module.register_parameter("again", nn.Parameter(module.weight)),
    "register_buffer": lambda module: module.register_buffer("again", module.weight.data[3:7]),
    "copy_": lambda module: module.ordinary.data.copy_(module.weight.data),
    "slices": lambda module: module.ordinary.data[:5].copy_(module.weight.data[2:7]),
    "one call writes to several": without_gradients(
        lambda module: torch._foreach_mul_([module.weight, module.buffer, module.ordinary], 2.0)
    ),
    "one call writes to recorded ones": without_gradients(
        lambda module: torch._foreach_copy_([module.weight, module.buffer], [module.buffer, module.ordinary])
    ),
    "batch norm": lambda module: module.norm(torch.rand(3, 50 * WIDE)),
}


@pytest.mark.parametrize("when", ["while it is built", "afterwards"])
@pytest.mark.parametrize("name", MIXED)
def test_recorded_tensors_meet_ordinary_ones(name: str, when: str) -> None:
    if when == "afterwards":
        module, plain = built_both_ways(Mixed)
        for each in (module, plain):
            torch.manual_seed(8)
            MIXED[name](each)
    else:
        module, plain = built_both_ways(lambda: Mixed(MIXED[name]))
    materialize(module)
    assert_same(module, plain)


def test_torch_s_own_property_is_back_once_nothing_is_recorded() -> None:
    before = vars(torch.Tensor).get("data")
    with deferred_init():
        module = linear()
    assert vars(torch.Tensor).get("data") is not before
    assert (torch.Tensor, "data") in replacements()
    materialize(module)
    assert (torch.Tensor, "data") not in replacements()
    assert vars(torch.Tensor).get("data") is before
