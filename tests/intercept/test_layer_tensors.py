"""Tensors of layers are found by what shares their memory; a step must not change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.layer_tensors import LayerTensors


@pytest.fixture
def layer() -> Any:
    layer = nn.Linear(3, 3)
    layer.register_buffer("tau", torch.ones(3))
    layer.register_buffer("elsewhere", AbsentTensor.like(torch.ones(3)))
    return layer


def tensors(layer: nn.Module) -> LayerTensors:
    return LayerTensors(lambda: [layer], lambda _, name: f"self.layer.{name}")


@pytest.mark.parametrize("name", ["weight", "tau", "elsewhere"])
def test_a_change_in_place_is_refused(layer: Any, name: str) -> None:
    changed = getattr(layer, name)
    with pytest.raises(CutError, match=rf"'mul_' changes `self\.layer\.{name}` in place in the step") as caught:
        tensors(layer).check([torch.ones(3), changed], "mul_")
    assert "on_train_batch_end" in str(caught.value.hint)


def test_views_and_data_share_the_memory(layer: Any) -> None:
    known = tensors(layer)
    for changed in (layer.tau[0], layer.tau.data, layer.weight.detach()):
        with pytest.raises(CutError, match="in place in the step"):
            known.check([changed], "mul_")


def test_other_tensors_may_change(layer: Any) -> None:
    known, former = tensors(layer), layer.tau
    known.check([torch.ones(3)], "mul_")
    layer.tau = torch.ones(3)
    known.check([former], "mul_")
    with pytest.raises(CutError, match=r"self\.layer\.tau"):
        known.check([layer.tau], "mul_")


@pytest.mark.parametrize("function", ["requires_grad_", "grad.__set__"])
def test_what_changes_no_values_is_allowed(layer: Any, function: str) -> None:
    tensors(layer).check([layer.weight], function)
