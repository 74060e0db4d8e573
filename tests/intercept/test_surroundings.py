"""Checkpoints, Functions, transforms and hooks around the calls of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_same, pipelined
from tests.support.small_net import Net, batches

pytestmark = pytest.mark.usefixtures("float64")


class NoGradPrefix(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                h = layer(h)
        for layer in self.layers[2:]:
            h = layer(h)
        return h


class Checkpointed(Net):
    reentrant = False

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return h


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class CheckpointedTogether(Net):
    """One checkpoint around several layers, and a cut inside."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return checkpoint(super().body, h, x, use_reentrant=False)


class NestedCheckpoints(Checkpointed):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return checkpoint(super().forward, x, y, use_reentrant=False)


class InsideGrad(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: super(InsideGrad, self).body(t, x).sum())(h)


class InsideVmap(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.vmap(lambda t: super(InsideVmap, self).body(t, x))(h)


class InsideForwardMode(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            out = super().body(torch.autograd.forward_ad.make_dual(h, torch.ones_like(h)), x)
            return torch.autograd.forward_ad.unpack_dual(out).primal


@pytest.mark.parametrize("model", [InsideGrad, InsideVmap, InsideForwardMode])
def test_transforms_on_one_rank(model: type[Net]) -> None:
    assert_same(model(), batches(), ranks=1, layers="layers")


@pytest.mark.parametrize(
    "model",
    [
        NoGradPrefix,
        Checkpointed,
        CheckpointedTogether,
    ],
    ids=lambda model: model.__name__,
)
def test_equals_one_device(model: type[Net], run: dict[str, Any]) -> None:
    assert_same(model(), batches(), **run)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ReentrantCheckpointed, "a checkpoint with use_reentrant=True stands outside layers"),
        (NestedCheckpoints, "surrounds layers and is inside another"),
        (InsideGrad, "lies inside a transform of torch.func"),
        (InsideVmap, "lies inside a transform of torch.func"),
        (InsideForwardMode, "or inside forward-mode differentiation"),
    ],
)
def test_what_cannot_be_served_raises(model: type[Net], message: str) -> None:
    with pytest.raises(CutError, match=message):
        pipelined(model(), batches(), 2, ranks=2, layers="layers")
