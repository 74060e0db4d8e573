"""The executor has a method for every action, and leaves nothing of a batch that fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Kind
from lightning_pipe.transport.single_process import SingleProcess

PARTS = [torch.ones(1, 2) * n for n in range(4)]


def pipeline() -> tuple[Pipeline, nn.Module]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    transport = SingleProcess()
    return Pipeline(module, find_layers(module), [1, 1], schedules.get("1f1b"), transport), module


def test_every_kind_of_action_has_a_method() -> None:
    steps = {Kind.STEP}  # the optimizer is the Trainer's
    assert pipeline()[0].executor._methods.keys() == set(Kind) - steps


def test_a_batch_that_fails_leaves_nothing() -> None:
    pipe, module = pipeline()

    def step(number: int, part: Tensor) -> Tensor:
        loss: Tensor = module(part).sum()
        if number == 2:
            raise ValueError("stop")
        return loss

    with pytest.raises(ValueError, match="stop"):
        pipe.train(step, PARTS, [1.0] * 4)
    executor = pipe.executor
    assert not any((executor.kept, executor.saved, executor.left, executor.gradients, executor.batches))
    pipe.train(lambda _, part: module(part).sum(), PARTS, [1.0] * 4)
