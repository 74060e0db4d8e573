"""Numbers of tensors, and what is placed in their objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.numbers import Numbers
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.tensor_spec import TensorSpec

CPU = torch.device("cpu")


def test_what_is_derived() -> None:
    numbers, x = Numbers(), torch.ones(3)
    assert not numbers.derived(x)
    assert numbers.derived(nn.Parameter(x, requires_grad=False))
    assert numbers.derived(torch.ones(3, requires_grad=True))
    assert numbers.derived(Placeholder(TensorSpec.of(x), CPU))
    numbers.give(x)
    assert numbers.derived(x)


def test_a_value_of_another_shape_raises() -> None:
    numbers, held = Numbers(), Placeholder(TensorSpec((3,), torch.float32), CPU)
    numbers.bind(held, 0)
    with pytest.raises(CutError, match=r"tensor 0 is \(2,\) torch.float32 on the stage that computes it and \(3,\)"):
        numbers.fill(0, torch.ones(2))
