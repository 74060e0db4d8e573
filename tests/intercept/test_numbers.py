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


def test_numbers_are_given_in_order_and_once() -> None:
    numbers, (x, y) = Numbers(), torch.ones(2, 3)
    assert [numbers.give(tensor) for tensor in (x, y, x)] == [0, 1, 0]
    assert numbers.of(y) == 1
    assert numbers.of(torch.ones(3)) is None


def test_the_numbers_of_one_run_mean_nothing_to_another() -> None:
    x = torch.ones(3)
    Numbers().give(x)
    assert Numbers().of(x) is None


def test_what_is_derived() -> None:
    numbers, x = Numbers(), torch.ones(3)
    assert not numbers.derived(x)
    assert numbers.derived(nn.Parameter(x, requires_grad=False))
    assert numbers.derived(torch.ones(3, requires_grad=True))
    assert numbers.derived(Placeholder.like(x, CPU))
    numbers.give(x)
    assert numbers.derived(x)


def test_only_what_lives_is_alive() -> None:
    numbers, x = Numbers(), torch.ones(3)
    numbers.give(x)
    numbers.give(torch.zeros(3))
    assert [number for number, _ in numbers.alive()] == [0]
    assert numbers.find(0) is x
    assert numbers.find(1) is None


def test_a_placeholder_is_filled_for_all_who_refer_to_it() -> None:
    numbers, held = Numbers(), Placeholder.of(TensorSpec((3,), torch.float32), CPU)
    same = [held]
    numbers.bind(held, 4)
    numbers.fill(4, torch.arange(3.0))
    assert type(same[0]) is torch.Tensor
    assert same[0].tolist() == [0, 1, 2]
    assert (numbers.of(held), numbers.following) == (4, 5)


def test_a_value_of_another_shape_raises() -> None:
    numbers, held = Numbers(), Placeholder.of(TensorSpec((3,), torch.float32), CPU)
    numbers.bind(held, 0)
    with pytest.raises(CutError, match=r"tensor 0 is \(2,\) torch.float32 on the stage that computes it and \(3,\)"):
        numbers.fill(0, torch.ones(2))
