"""Several versions of a rank's weights at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe.engine.weight_versions import WeightVersions
from lightning_pipe.errors import CutError
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.partition import find_layers


def versions() -> tuple[WeightVersions, nn.Linear]:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    module = nn.Sequential(linear, nn.Tanh())
    return WeightVersions(module, Ownership(module, find_layers(module), [(0,), (0,)], 0, (0,), ["rank 0"])), linear


def test_a_batch_computes_with_the_version_that_it_began_with() -> None:
    weights, linear = versions()
    own = linear.weight
    with weights.call(), weights.using(0, version=0):
        pass
    weights.step(oldest=0)
    own.data.fill_(5.0)
    with weights.call(), weights.using(0, version=0):
        assert linear(torch.ones(1, 1)).item() == 1.0
    assert linear.weight is own
    assert own.item() == 5.0
    assert (weights.held, weights.peak_held) == (2, 2)
    weights.step(oldest=2)
    assert weights.held == 1


def test_gradients_of_batches_are_averaged_in_the_parameter() -> None:
    weights, linear = versions()
    for batch, factor in enumerate((1.0, 3.0)):
        with weights.call(), weights.using(batch, version=0):
            linear(torch.full((1, 1), factor)).sum().backward()
    assert linear.weight.grad is None
    weights.collect([0, 1])
    assert linear.weight.grad is not None
    assert linear.weight.grad.item() == 2.0


def test_a_parameter_that_is_used_behind_the_module_raises() -> None:
    weights, linear = versions()
    own = linear.weight
    with pytest.raises(CutError, match="through a reference that is no attribute of a module"), weights.call():
        (own * 2).sum().backward()
