"""Tensors of layers are found by what shares their memory; a step must not change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.layer_tensors import check_unchanged


@pytest.fixture
def layer() -> Any:
    layer = nn.Linear(3, 3)
    layer.register_buffer("tau", torch.ones(3))
    layer.register_buffer("elsewhere", AbsentTensor.like(torch.ones(3)))
    return layer


def check(layer: nn.Module, *changed: Tensor, training: bool = True, **parts: nn.Module) -> None:
    module = nn.ModuleDict({"layer": layer, **parts})
    check_unchanged(LayerState(module, [("layer", layer)]), changed, "mul_", training=training)


@pytest.mark.parametrize("name", ["weight", "tau", "elsewhere"])
def test_a_change_in_place_is_refused(layer: Any, name: str) -> None:
    changed = getattr(layer, name)
    with pytest.raises(CutError, match=rf"'mul_' changes `self\.layer\.{name}` in place in the step") as caught:
        check(layer, torch.ones(3), changed)
    assert "on_train_batch_end" in str(caught.value.hint)


def test_views_and_data_share_the_memory(layer: Any) -> None:
    for changed in (layer.tau[0], layer.tau.data, layer.weight.detach()):
        with pytest.raises(CutError, match="in place in the step"):
            check(layer, changed)


def test_other_tensors_may_change(layer: Any) -> None:
    former = layer.tau
    check(layer, torch.ones(3))
    layer.tau = torch.ones(3)
    check(layer, former)
    with pytest.raises(CutError, match=r"self\.layer\.tau"):
        check(layer, layer.tau)


def test_in_an_evaluation_parameters_outside_layers_stay_as_well(layer: Any) -> None:
    head = nn.BatchNorm1d(3)
    check(layer, head.weight, head=head)
    check(layer, head.running_mean, head=head, training=False)  # type: ignore[arg-type]
    with pytest.raises(CutError, match=r"self\.head\.weight"):
        check(layer, head.weight, head=head, training=False)
