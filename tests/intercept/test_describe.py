"""What calls leave behind, as records tell it; a call like the last one of its layer gets the same record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import Value
from lightning_pipe.intercept.describe import described, stand_ins
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import tree_unflatten
from tests.intercept.test_skipped_layers import recorded, run_cache

X = torch.ones(2, 3, requires_grad=True)


class Returns(nn.Module):
    """Returns what a function makes of its arguments."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def test_the_record_of_the_last_run_is_used_again() -> None:
    cache, layer = run_cache(), nn.Linear(3, 3)
    # At first its attributes are searched, too.
    calls = [recorded(layer, X, cache=cache)[1] for _ in range(6)]
    assert calls[-1] is calls[-2]
    pairs = Returns(lambda x, pair: x * pair[0] + pair[1])
    calls = [recorded(pairs, X, (X, torch.ones(3)), cache=cache)[1] for _ in range(3)]
    assert calls[-1] is calls[-2]
    narrower = recorded(layer, X[:1], cache=cache)[1]
    assert narrower is not calls[-1]
    assert narrower.leaves == (TensorSpec((1, 3), torch.float32),)


def test_a_result_that_comes_twice_is_one_tensor_on_other_stages_too() -> None:
    x = torch.ones(2)
    _, leaves, new = described([out := x * 2, out, x], [x], x.device)
    assert [id(each) for each in new] == [id(out)]
    first, second, third, number = stand_ins((*leaves, Value.of(3.5)), [x], x.device)
    assert first is second
    assert third is x
    assert number == 3.5


@dataclass
class Held:
    h: Tensor


class Named(NamedTuple):
    h: Tensor
    count: int


def test_a_dataclass_raises_where_a_named_tuple_crosses() -> None:
    with pytest.raises(CutError, match=r"'layers\.0' returns a Held, which cannot be shown") as caught:
        recorded(Returns(lambda x: Held(x * 2)), X)
    assert "tuples (named ones too)" in str(caught.value.hint)
    result, call, _ = recorded(Returns(lambda x: Named(x * 2, 3)), X)
    assert tree_unflatten([*call.leaves], call.structure) == Named(TensorSpec.of(result.h), Value.of(3))
