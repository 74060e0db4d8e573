"""What a stage keeps of a micro-batch, and when it lets go of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.stage import Saved, loss_of
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.intercept.crossing import Returned
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from tests.support.engine_runs import assert_same, pipelined

PARTS = [torch.ones(1, 2)] * 3


def of_two_stages(schedule: str) -> tuple[Pipeline, nn.Module]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    transport = SingleProcess()
    return Pipeline(module, find_layers(module), [1, 1], schedules.get(schedule), transport), module


def test_a_batch_leaves_nothing_for_the_garbage_collector() -> None:
    """Graphs with activations are freed when their backward pass is done, not at some later time."""
    pipeline, module = of_two_stages("1f1b")
    found = []
    gc.disable()
    try:
        for _ in range(5):
            pipeline.train(lambda _, part: module(part).sum(), PARTS, [1.0] * 3)
            found.append(gc.collect())
    finally:
        gc.enable()
    # What the tests before this one have left may be let go of meanwhile; a batch would leave something every time.
    assert 0 in found[2:]


def test_a_backward_pass_frees_its_graph_itself(monkeypatch: Any) -> None:
    """So that it counts as the stage's time: the caller still has what the forward pass left."""
    pipeline, module = of_two_stages("1f1b")
    stages = pipeline.executor.stages
    backward = stages.backward
    left: list[tuple[int, Tensor | None]] = []

    def noting(saved: Saved, came: Returned, *, whole: bool) -> Any:
        result = backward(saved, came, whole=whole)
        left.append((len(saved.outbound), saved.loss))
        return result

    monkeypatch.setattr(stages, "backward", noting)
    pipeline.train(lambda _, part: module(part).sum(), PARTS, [1.0] * 3)
    assert left == [(0, None)] * 6


@pytest.mark.parametrize("loss", [torch.zeros(2), torch.zeros((), dtype=torch.complex64)])
def test_a_loss_is_one_real_number(loss: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="must be a single real number, not a torch"):
        loss_of(loss)


class Differentiates(nn.Module):
    """Gives the gradient of what a layer computes; by torch.autograd: intercept/test_recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def energy(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight).pow(2).sum()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(self.energy)(x)


class Derivatives(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).pow(2).mean()


@pytest.mark.usefixtures("float64")
def test_layers_may_give_derivatives_by_torch_func_unless_they_are_computed_again() -> None:
    torch.manual_seed(0)
    module, data = Derivatives(Differentiates(), Differentiates()), [{"input": torch.randn(6, 2)} for _ in range(2)]
    assert_same(module, data)
    with pytest.raises(CutError, match=r"uses torch.func .*\n.*recompute='never', or torch.autograd.grad"):
        pipelined(module, data, 2, recompute="always")
