"""Several versions of a rank's weights at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe.engine.weight_versions import WeightVersions
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.partition import find_layers


def versions() -> tuple[WeightVersions, nn.Linear]:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    module = nn.Sequential(linear, nn.Tanh())
    return WeightVersions(module, Ownership(module, find_layers(module), [(0,), (0,)], 0, (0,), ["rank 0"])), linear


@pytest.mark.parametrize("counted", [True, False])
def test_a_change_between_the_passes_of_a_batch_is_one_of_the_next_version(counted: bool) -> None:
    """As by a hook that clamps weights, in a call without a step."""
    weights, linear = versions()
    weights.begin_call()
    given = torch.ones(1, 1, requires_grad=True)
    with weights.using(0, version=0):
        result = linear(given)
    weights.keep(oldest=0, steps=False)
    with torch.no_grad():
        (linear.weight if counted else linear.weight.data).clamp_(max=0.5)
    weights.begin_call()
    with weights.using(0, version=0):
        result.sum().backward()
    with weights.using(1, version=0):  # a batch that comes later has what others with this version have
        assert linear(torch.ones(1, 1)).item() == 1.0
    assert given.grad == 1.0
    weights.keep(oldest=1, steps=True)
    assert linear.weight.item() == 0.5
    assert weights.newest == 1
    assert not weights.stash


def test_autocast_makes_its_copies_of_each_version() -> None:
    weights, linear = versions()
    weights.begin_call()
    weights.keep(oldest=0, steps=True)
    linear.weight.data.fill_(5.0)
    with torch.autocast("cpu", torch.bfloat16):
        for version in (0, 1, 0):
            with weights.using(0, version):
                assert linear(torch.ones(1, 1)).item() == (5.0 if version else 1.0)


def test_parameters_of_a_class_of_their_own_are_refused() -> None:
    class Own(nn.Parameter):
        pass

    weights, linear = versions()
    linear.weight = Own(torch.ones(1, 1))
    with pytest.raises(ConfigurationError, match="A parameter is a Own; asynchronous schedules keep several versions"):
        weights.begin_call()
