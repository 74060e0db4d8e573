"""Trains a module whose second layer returns what is no tensor, on one device and over cuts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from tests.support.trainer_runs import QUIET

WIDTH = 3
Make = Callable[[Tensor], Any]


class Head(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make, self.linear = make, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


class ReturningLayers(L.LightningModule):
    """Subclasses have the step: they give what the second layer makes to the last one.

    Args:
        make: what the second layer returns for a tensor.
        score: the last layer.
        rate: the learning rate.
    """

    def __init__(self, make: Make, score: nn.Module, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Head(make), nn.Linear(WIDTH, WIDTH), score])
        self.losses: list[float] = []
        self.rate = rate

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def _train(module: ReturningLayers, strategy: Any) -> tuple[list[float], list[str]]:
    """The losses, and warnings about samples."""
    module = module.double()
    data = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **{**QUIET, "max_epochs": 2})
        trainer.fit(module, DataLoader([*data], 4))
    return module.losses, [str(each.message) for each in caught if "samples" in str(each.message)]


def assert_crosses_cuts(made: Callable[[], ReturningLayers]) -> None:
    """The losses over two and four stages are those of one device, and nothing is said about samples."""
    plain, _ = _train(made(), "auto")
    for stages in (2, 4):
        found, told = _train(made(), PipeStrategy(layers="layers", stages=stages, micro_batches=2))
        assert found == pytest.approx(plain, rel=1e-9)
        assert told == []
