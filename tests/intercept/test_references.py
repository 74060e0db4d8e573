"""What the code of a layer names is found, through functions, closures and other modules, and nothing else is."""

from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.references import References, is_state, leads_to

GAIN = 2.0
SEEN = list[float]()


def noted(x: Tensor) -> Tensor:
    SEEN.append(float(x.sum()))
    return x


PLACE = f"<{__name__}>"


class Layer(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.linear, self.scale, self.unread = nn.Linear(2, 2), 1.0, 5
        for name, each in held.items():
            vars(self)[name] = each

    def forward(self, x: Tensor) -> Tensor:
        return noted(self.linear(x)) * self.scale * GAIN


class ReadsItsOwner(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.owner[0].gain * self.owner[0].factor()


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.count, self.half = 1.0, 7, 0.5
        self.register_buffer("mean", torch.ones(1))

    def factor(self) -> float:
        return self.half

    def other(self) -> int:
        return self.count


def values(layer: nn.Module) -> dict[Any, Any]:
    return dict(References("", layer, known()).values())


def known(*same: nn.Module) -> Any:
    """Knows which modules the stage of the layer runs, and that no other module is a part of a layer."""
    return SimpleNamespace(same_stage=lambda _, part: part in same, root_of=same)


def test_own_attributes_and_globals_that_are_named_are_found() -> None:
    assert values(nn.Sequential(Layer())) == {("0", "scale"): 1.0, (PLACE, "GAIN"): 2.0}


def test_of_another_module_what_the_code_names_is_found() -> None:
    found = values(ReadsItsOwner(owner=[Owner()]))
    assert found[("<0>", "gain")] == 1.0
    assert found[("<0>", "half")] == 0.5, "its method reads it"
    assert not {("<0>", "count"), ("<0>", "mean")} & found.keys()


def test_what_runs_in_the_same_stage_is_left_out() -> None:
    owner = Owner()
    found = References("", ReadsItsOwner(owner=[owner]), known(owner)).values()
    assert not any(path == "<0>" for (path, _), _ in found)


def test_hooks_belong_to_the_layer() -> None:
    owner, layer = Owner(), Layer()
    layer.linear.register_forward_pre_hook(lambda module, given: (given[0] * owner.gain,))
    assert values(layer)[("<0>", "gain")] == 1.0


def test_closures_are_read() -> None:
    table = {"gain": 1.0}
    layer = Layer(function=lambda x: x * table["gain"])
    assert values(layer)[(PLACE, "table")] == table


def test_what_is_large_counts_by_its_length() -> None:
    assert values(Layer(scale=[0.0] * 5000))[("", "scale")] == 5000


@pytest.mark.parametrize("refer", ["list", "weakref", "method", "partial", "closure"])
def test_modules_are_found_behind_what_leads_to_them(refer: str) -> None:
    owner = Owner()
    ways = {
        "list": [{"of": owner}],
        "weakref": weakref.ref(owner),
        "method": owner.zero_grad,
        "partial": functools.partial(print, owner),
        "closure": lambda: owner,
    }
    assert owner in [*leads_to(ways[refer])]


class Memory:
    calls = 0


class Slots:
    __slots__ = ("calls",)


@pytest.mark.parametrize("value", [1, "a", None, [1], {"a": 1}, {1}, np.ones(1), Memory(), SimpleNamespace(), Slots()])
def test_numbers_containers_and_objects_may_be_kept(value: Any) -> None:
    assert is_state(value)


@pytest.mark.parametrize("value", [torch.ones(1), nn.Identity(), print, Memory])
def test_tensors_modules_and_functions_are_no_such_values(value: Any) -> None:
    assert not is_state(value)
