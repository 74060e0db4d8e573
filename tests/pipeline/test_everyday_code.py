"""Everyday code around layers gives the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pipeline.engine import assert_same
from tests.pipeline.test_cut import RUNS, WIDTH, Net, batches

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=RUNS, ids=lambda run: "-".join(map(str, run.values())))
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"layers": "layers", **request.param}


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scales: list[dict[str, Tensor]]) -> Tensor:
        return x + torch.tanh(self.linear(x) * scales[0]["scale"])


class ParameterOfAModule(Net):
    """A module outside the layers is given a parameter that nothing else uses, as DeBERTa's norm of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(5, WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        table = self.norm(self.table)
        for layer in self.layers:
            h = layer(h) + table.mean(0)
        return h


class ParameterOfLayers(Net):
    """Layers are given a parameter, inside of containers."""

    block = ScaledBlock

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h, [{"scale": self.scale}])
        return h


class NumbersOfSomeBatches(Net):
    """Computes a number of every layer's result, and uses it in some batches, as those that are logged at times."""

    def forward(self, x: Tensor, y: Tensor, wanted: Tensor) -> Any:  # type: ignore[override]
        h, kept = self.embed(x), []
        for layer in self.layers:
            h = layer(h)
            mean = h.mean()
            if wanted[0]:
                kept.append(mean)
        return F.mse_loss(self.head(h), y) + sum(kept)


@pytest.mark.parametrize("kind", [ParameterOfAModule, ParameterOfLayers], ids=lambda kind: kind.__name__)
def test_parameters_that_modules_are_given(kind: type[Net], run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    assert_same(kind(), batches(), **run)


def test_numbers_that_some_batches_use(run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    data = [{**batch, "wanted": torch.full((7,), number in (1, 3))} for number, batch in enumerate(batches(5))]
    assert_same(NumbersOfSomeBatches(), data, **run)
