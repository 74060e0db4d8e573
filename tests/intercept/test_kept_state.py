"""Which values may be kept by calls, and which say the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_pipe.intercept.kept_state import alike, is_own, written


class Memory:
    def __init__(self, **held: Any) -> None:
        self.calls = 0
        vars(self).update(held)


ALIKE: list[tuple[Any, Any, bool]] = [
    (1, 1, True),
    (1, 1.0, False),
    (math.nan, math.nan, True),
    ({"a": [1, {2}], "b": 3}, {"b": 3, "a": [1, {2}]}, True),
    ([1, 2], [2, 1], False),
    (torch.ones(2), torch.ones(2), True),
    (torch.ones(2), torch.ones(3), False),
    (np.ones(2), np.zeros(2), False),
    (torch.ones(2), np.ones(2), False),
    (torch.tensor(0.5), 0.5, False),
    ((0.9, 0.999), (0.9, 0.999), True),
    (None, 1, False),
    (Memory(of=[torch.ones(1)]), Memory(of=[torch.ones(1)]), True),
    (Memory(of=1), Memory(of=2), False),
]


@pytest.mark.parametrize(("one", "other", "same"), ALIKE)
def test_values_are_alike_if_they_say_the_same(one: Any, other: Any, same: bool) -> None:
    assert alike(one, other) is same


def test_what_holds_itself_is_compared() -> None:
    one: list[Any] = [1]
    other: list[Any] = [1]
    one.append(one)
    other.append(other)
    assert alike(one, other)


def test_what_is_held_twice_is_compared_twice() -> None:
    held = [1]
    assert alike([held, held], [[1], [1]])
    assert not alike([held, held], [[1], [2]])


def test_modules_of_libraries_are_known() -> None:
    class Own(nn.Module):
        pass

    assert is_own(Own())
    assert not any(map(is_own, (nn.Linear(1, 1), torchmetrics.MeanMetric())))


def test_an_attribute_is_named_as_code_writes_it() -> None:
    assert (written("", "count"), written("layers.0", "drop", "p")) == ("self.count", "self.layers.0.drop.p")
