"""Derivatives inside a step: those of one stage are exact, and those over a cut raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad  # a name of its own, as many have it
from torch.nn import functional as F

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_same, pipelined
from tests.support.pairs import every_second, pairs
from tests.support.small_net import WIDTH, Block, Net, batches

pytestmark = pytest.mark.usefixtures("float64")

RUNS = [{"ranks": 2}, {"ranks": 1, "stages": 4}]


def squares(out: Tensor, y: Tensor, *derivatives: Tensor) -> Tensor:
    return F.mse_loss(out, y) + sum(each.square().mean() for each in derivatives)


class ByInput(Net):
    """A gradient penalty; the input is a residual of every layer."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.head(self.body(self.embed(x.requires_grad_()), x))
        return squares(out, y, *grad(out.sum(), x, create_graph=True))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h) + x
        return h


class ByHidden(Net):
    """By what came over the cut, and what else came over it derives from."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        embedded = self.embed(x)
        out = self.head(self.body(embedded, x) + embedded)
        return squares(out, y, *grad(out.sum(), embedded, create_graph=True))


class ByScale(Net):
    """By a parameter that is used outside modules, before the layers and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.head(self.body(self.embed(x) * self.scale, x) * self.scale)
        return squares(out, y, *grad(out.square().sum(), self.scale, create_graph=True))


class Force(Block):
    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        energy = (self.linear(h) * position).tanh()
        return energy + grad(energy.sum(), position, create_graph=True)[0]


class ByPosition(Net):
    """Every layer takes a derivative by an argument of all layers."""

    block = Force

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        position = x.requires_grad_()
        for layer in self.layers:
            h = layer(h, position)
        return h


class Backward(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.body(self.embed(x), x)
        (0.1 * h.square().mean()).backward(retain_graph=True)
        return F.mse_loss(self.head(h), y)


class ByTiedLayers(Net):
    """By a weight of a layer that a layer of an earlier stage has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].linear.weight = self.layers[-1].linear.weight

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.head(self.body(self.embed(x), x))
        return squares(out, y, *grad(out.square().sum(), self.layers[-1].linear.weight, create_graph=True))


class BackwardInLayers(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            (0.1 * out.square().mean()).backward(retain_graph=True)
            return out


@pytest.mark.parametrize(
    ("net", "run"),
    pairs(
        [ByInput, ByHidden, ByTiedLayers, ByScale, ByPosition, Backward, BackwardInLayers],
        RUNS,
        every_second,
    ),
)
def test_a_derivative_over_a_cut_raises(net: type[Net], run: dict[str, Any]) -> None:
    assert_same(net(), batches(1), layers="layers", ranks=1)
    with pytest.raises(CutError, match="goes back over the cut"):
        pipelined(net(), batches(1), 2, layers="layers", **run)


class ByLastWeight(Net):
    """The balance of two losses by their gradients at the last layer, as VQGAN has it."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.head(self.body(self.embed(x), x))
        losses = F.mse_loss(out, y), out.square().mean()
        one, other = (grad(loss, self.head.weight, retain_graph=True)[0].norm() for loss in losses)
        return losses[0] + losses[1] * (one / (other + 1e-4)).detach()


class ByLastLayer(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.head(self.body(self.embed(x), x))
        return squares(out, y, *grad(out.square().sum(), self.layers[-1].linear.weight, create_graph=True))


class ByOwn(Net):
    """By what the last stage makes, and by an input that earlier stages use without a gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.body(self.embed(x), x) * 1.0
        x.requires_grad_()
        out = self.head(h.sin() + x)
        return squares(out, y, *grad(out.square().sum(), [h, x], create_graph=True))


class Forces(Block):
    """By the layer's argument, which comes over the cut alone."""

    def forward(self, x: Tensor) -> Tensor:
        energy = super().forward(x)
        return energy + grad(energy.sum(), x, create_graph=True)[0]


class InLayers(Net):
    block = Forces


class AsAdvised(Net):
    """By what the layer makes of its argument, as the error says."""

    class block(Forces):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 1.0)


@pytest.mark.parametrize(
    ("net", "run"), pairs([ByLastWeight, ByLastLayer, ByOwn, InLayers, AsAdvised], RUNS, every_second)
)
def test_a_derivative_on_one_stage_is_exact(net: type[Net], run: dict[str, Any]) -> None:
    assert_same(net(), batches(), layers="layers", **run)
