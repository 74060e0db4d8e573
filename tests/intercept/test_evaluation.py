"""Evaluations: the numbers of one device, and layers that they leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_evaluates, assert_same, pipelined, unchanging
from tests.support.pairs import every_second, pairs, slow_but
from tests.support.small_net import (
    WIDTH,
    Block,
    FilledThroughViews,
    InPlaceBlock,
    Net,
    ViewsAndChunks,
    batch,
    batches,
)

pytestmark = pytest.mark.usefixtures("float64")


class OwnChangedByLayer(Net):
    """The second layer changes a tensor of the step's own in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = InPlaceBlock()

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        own = torch.ones(len(x), WIDTH)
        h = self.layers[0](h) + self.layers[1](own)
        for layer in self.layers[2:]:
            h = layer(h)
        return h * own


class BatchChangedByLayer(Net):
    """The first layer changes the batch in place, which is the target as well."""

    block = InPlaceBlock

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.head(self.body(x, x)), y) + F.mse_loss(x, y)


class Conjugates(Net):
    """What crosses the cuts is conjugated and negated by a mark alone, not in memory."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x.real, super().forward(x.real + x.imag)).conj()

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = torch.complex(h, x)
        first = h.conj().imag
        return super().body(h, x).imag + first


@pytest.mark.parametrize(
    ("model", "context"),
    pairs(
        [OwnChangedByLayer, BatchChangedByLayer, FilledThroughViews, ViewsAndChunks, Conjugates],
        [torch.no_grad, torch.inference_mode],
        every_second,
    ),
)
def test_evaluation_gives_the_loss_of_one_device(model: type[Net], context: Any, run: dict[str, Any]) -> None:
    assert_evaluates(model(), batch(5), batch(), context, **run)


class LeavesOut(Net):
    """An evaluation calls no layers, or some, as the batch says by its first entry."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.training:
            return super().forward(x, y)
        kind = int(x[0, 0])
        if kind == 0:
            return torch.ones(())
        if kind == 1:
            return {"loss": y.mean(), "seen": len(x)}
        h = self.embed(x)
        for layer in self.layers[: kind - 2]:
            h = layer(h) + x
        return {"loss": h.sum(), "hidden": h} if kind % 2 else h.mean()


@pytest.mark.parametrize("context", slow_but([torch.no_grad, torch.inference_mode], torch.inference_mode))
def test_an_evaluation_may_leave_layers_out(context: Any, run: dict[str, Any]) -> None:
    net, found, expected = LeavesOut(), [], []
    parts = [batch(5) for _ in range(9)]
    for kind, part in zip((0, 1, 2, 6, 4, 3, 1, 5, 0), parts, strict=True):
        part["x"][0, 0] = kind

    def evaluate(pipeline: Any, module: nn.Module) -> None:
        module.eval()
        for part in parts:
            with context():
                found.extend(pipeline.evaluate(lambda _, part: module(**part), [part]).values())
        module.train()

    assert_same(net, batches(2), optimizer=unchanging, between=evaluate, **run)
    net.eval()
    with torch.no_grad():
        expected = 2 * [net(**part) for part in parts]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


class EndsByRank(Net):
    """One rank leaves its evaluation early."""

    ends = False

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x.mean() if self.ends and not self.training else super().forward(x, y)


@pytest.mark.parametrize("ending", [0, 1])
def test_all_ranks_must_leave_the_same_layers_out(ending: int) -> None:
    def evaluate(pipeline: Any, module: Any) -> None:
        module.ends = pipeline.transport.rank == ending
        module.eval()
        pipeline.evaluate(lambda _, part: module(**part), [batch(5)])

    with pytest.raises(CutError, match=r"the previous stage made 'the end of the step'|before layer 'layers\.2'"):
        pipelined(EndsByRank(), batches(1), 1, between=evaluate, ranks=2, layers="layers")
