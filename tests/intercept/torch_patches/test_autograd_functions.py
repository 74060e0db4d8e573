"""Functions with a backward of their own that surround layers: equal to one device, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_close, assert_same, pipelined
from tests.support.function_nets import (
    Again,
    AroundCheckpoints,
    AroundReentrant,
    FrozenFirst,
    InLayers,
    InsideCheckpoints,
    InsideReentrant,
    Own,
    OwnBehind,
    OwnByVjp,
    OwnNested,
    OwnScaled,
    OwnStored,
    OwnWithWeights,
    Prepared,
    Residual,
    Reversible,
    ScaledInLayers,
    Stored,
)
from tests.support.pairs import every_second, pairs
from tests.support.small_net import WIDTH, Block, Net, batches

pytestmark = pytest.mark.usefixtures("float64")


EXACT = [Own, OwnWithWeights, OwnByVjp, OwnStored, OwnBehind, OwnScaled, ScaledInLayers, OwnNested, Residual, Prepared,
         InsideCheckpoints, InsideReentrant, AroundCheckpoints, AroundReentrant, InLayers, FrozenFirst]  # fmt: skip
RUNS = [
    {"ranks": 2},
    {"ranks": 4, "schedule": "gpipe"},
    {"ranks": 2, "schedule": "interleaved", "recompute": "always"},
    {"ranks": 2, "schedule": "zero_bubble"},
    {"ranks": 1, "stages": 4},
]


@pytest.mark.parametrize(("net", "run"), pairs(EXACT, RUNS, every_second))
def test_functions_around_layers_equal_one_device(net: type[Net], run: dict[str, Any]) -> None:
    assert_same(net(), batches(2), layers="layers", **run)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_function_around_layers_of_one_stage_equals_one_device(schedule: str) -> None:
    assert_same(Reversible(), batches(2), layers="layers", schedule=schedule)


class ChangesFirst(Own):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = h * 1.0
            h = Again.apply(lambda y, layer=layer: layer(y.mul_(0.5)), h)
        return h


class OtherName(Own):
    """A name that was given to ``apply`` before there was a pipeline."""

    again = staticmethod(Again.apply)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.again(layer, h)
        return h


class OtherNameInside(OtherName):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.again(lambda h, layer=layer: layer(h * 2.0), h)
        return h


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Reversible, r"the cut before layer 'layers\.1' lies inside the torch\.autograd\.Function 'Coupled'"),
        (ChangesFirst, r"'Again' changes a tensor in place before it calls layer 'layers\.1'"),
        (OtherName, r"'Again' calls layer 'layers\.[01]', next to a cut, and was applied under another name"),
        (OtherNameInside, r"'Again' calls layer 'layers\.1', next to a cut, and was applied under another name"),
    ],
)
def test_functions_that_cannot_be_cut_raise(net: type[Net], message: str) -> None:
    with pytest.raises(CutError, match=message):
        pipelined(net(), batches(1), 2, layers="layers", ranks=4)


class Drawing(Own):
    """Draws inside layers and between them; a Function that keeps its graph draws once, others twice."""

    kind: Any = Stored

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        def noisy(layer: Any, h: Tensor) -> Tensor:
            return F.dropout(layer(F.dropout(h, 0.2)), 0.2) * torch.rand(WIDTH)

        for layer in self.layers:
            h = self.call(lambda h, layer=layer: noisy(layer, h), h)
        return h

    def call(self, block: Any, h: Tensor) -> Tensor:
        return self.kind.apply(block, h)


class StoredAgain(Stored):
    """Does the same in its forward, and does not use what it has kept."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer, ctx.state = layer, torch.get_rng_state()
        return Stored.forward(ctx, layer, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            ctx.y = ctx.layer(ctx.x)
        torch.set_rng_state(before)
        return Stored.backward(ctx, gradient)


class DrawingAgain(Drawing):
    kind = StoredAgain


class DrawingInCheckpoints(Drawing):
    def call(self, block: Any, h: Tensor) -> Tensor:
        return checkpoint(StoredAgain.apply, block, h, use_reentrant=False)


class DrawingInReentrant(Drawing):
    def call(self, block: Any, h: Tensor) -> Tensor:
        return checkpoint(StoredAgain.apply, block, h, use_reentrant=True)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("net", [DrawingAgain, DrawingInCheckpoints, DrawingInReentrant])
def test_what_is_computed_again_draws_the_same_numbers(net: type[Net], stages: int) -> None:
    # Threads share torch's generator: one rank at a time.
    data, model, other = batches(), Drawing(), net()
    other.load_state_dict(model.state_dict())
    expected = pipelined(model, data, 3, ranks=1, stages=2, layers="layers")
    found = pipelined(other, data, 3, ranks=1, stages=stages, layers="layers")
    assert found.losses == pytest.approx(expected.losses, abs=1e-12)
    assert_close(found.values, expected.values, 1e-12)


def test_nothing_stays_patched() -> None:
    before = vars(Function)["apply"]
    pipelined(Own(), batches(1), 2, layers="layers")
    assert vars(Function)["apply"] is before


class Reformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.ReformerConfig(
            attention_head_size=4, attn_layers=["local"] * 4, axial_pos_embds=False, feed_forward_size=8,
            hidden_size=8, num_attention_heads=2, local_attn_chunk_length=4, max_position_embeddings=16,
            vocab_size=11, is_decoder=True, hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = transformers.ReformerModelWithLMHead(config)

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids, labels=ids).loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_reformer_stays_on_one_stage(ranks: int) -> None:
    data = [{"ids": torch.randint(11, (4, 16))} for _ in range(2)]
    if ranks == 1:
        assert_same(Reformer(), data, 2, layers="model.reformer.encoder.layers", ranks=1)
    else:
        with pytest.raises(CutError, match=r"lies inside the torch\.autograd\.Function '_ReversibleFunction'"):
            pipelined(Reformer(), data, 2, layers="model.reformer.encoder.layers")
