"""Whether a layer has read the same on its stage as it would on the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.around import Around


class Owner(nn.Module):
    gain: Any


class Configuration:
    def __init__(self, *values: Any) -> None:
        self.values = values


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1, False),
        (float("nan"), float("nan"), True),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"a": [1]}, {"a": [2]}, False),
        ({"x", "y", "z"}, {"z", "y", "x"}, True),
        (Configuration(1, {2}), Configuration(1, {2}), True),
        (Configuration(1, {2}), Configuration(1, {3}), False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
        (torch.ones(2), None, False),
    ],
    # what stands in the values differs between processes: the addresses of objects, the order of sets
    ids=range(11),
)
def test_values_that_say_the_same_are_the_same(then: Any, now: Any, same: bool) -> None:
    module = Owner()
    around = Around(module)
    module.gain = then
    told = around.told(module, "gain")
    assert told is not None
    module.gain = now
    if same:
        around.check("layers.0", [told])
    else:
        with pytest.raises(CutError, match=r"`self\.gain`"):
            around.check("layers.0", [told])


@pytest.mark.parametrize(
    "value", [torch.ones(1000), {"a": torch.ones(1)}, torch.ones(1, requires_grad=True)], ids=range(3)
)
def test_large_tensors_and_what_holds_tensors_are_not_compared(value: Any) -> None:
    module = Owner()
    module.gain = value
    assert Around(module).told(module, "gain") is None
