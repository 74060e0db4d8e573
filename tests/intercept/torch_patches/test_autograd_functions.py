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
from tests.support.small_net import WIDTH, Block, Net, batches

pytestmark = pytest.mark.usefixtures("float64")


class Again(Function):
    """Keeps the input of a layer alone, and computes it again in its backward."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer, ctx.state = layer, torch.get_rng_state()
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.set_rng_state(before)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class WithWeights(Function):
    """Has the weights as arguments, and returns their gradients."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, *weights)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.layer(x), [x, *weights], gradient)


class ByVjp(Function):
    """The same by ``torch.func``, with a context of its own."""

    @staticmethod
    def forward(layer: Any, x: Tensor, *weights: Tensor) -> Tensor:
        return layer(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layer, x, *weights = inputs
        ctx.save_for_backward(x, *weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        names = [name for name, _ in ctx.layer.named_parameters()]

        def call(x: Tensor, *weights: Tensor) -> Tensor:
            return torch.func.functional_call(ctx.layer, dict(zip(names, weights, strict=True)), (x,))

        return None, *torch.func.vjp(call, x, *weights)[1](gradient)


class Stored(Function):
    """Keeps the graph of the forward, which ends at the input."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.autograd.backward(ctx.y, gradient)
        return None, ctx.x.grad


class Behind(Function):
    """The graph of the forward goes on behind the input, and its own backward does half of the work."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.y = layer(x)
            ctx.x = x
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.autograd.backward(ctx.y, 0.5 * gradient, retain_graph=True)
        return None, torch.autograd.grad(ctx.y, ctx.x, 0.5 * gradient, retain_graph=True)[0]


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return Again.apply(layer, Same.apply(x)) * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = Again.apply(ctx.layer, Same.apply(x)) * 2.0
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Same(Function):
    """Returns what it is given; gradients change on their way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Scaled(Function):
    """One weight is an argument; its backward finds the gradients of the others by itself."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, scale)
        return layer(x) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.layer(x) * scale
        torch.autograd.backward(y, gradient)
        return None, x.grad, scale.grad


class Own(Net):
    """One Function around each layer."""

    kind: Any = Again

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.kind.apply(layer, h)
            assert h.requires_grad  # on stages that wait too
        return h


class OwnWithWeights(Own):
    kind = WithWeights

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + self.kind.apply(layer, h, *layer.parameters())
        return h


class OwnByVjp(OwnWithWeights):
    kind = ByVjp


class OwnStored(Own):
    kind = Stored


class OwnBehind(Own):
    kind = Behind


class OwnScaled(Own):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scale, strict=True):
            h = Scaled.apply(layer, h, scale)
        return h


class ScaledInLayers(Net):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(super().forward, x, self.scale)


class OwnNested(Own):
    kind = Nested


class Residual(Own):
    """What goes into a Function is needed behind it, by the last layer as well."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h
        for layer in self.layers:
            h = Same.apply(h) + self.kind.apply(layer, h)
        return h * first


class Prepared(Own):
    """Works on the input before it calls the layer, with a module and with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = Again.apply(lambda h, layer=layer: layer(self.norm(h.contiguous() * self.scale)) + h, h)
        return h


class Coupled(Function):
    """A reversible pair of layers: its backward finds the input again from the output."""

    @staticmethod
    def forward(ctx: Any, one: Any, two: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        left = left + one(right)
        right = right + two(left)
        ctx.one, ctx.two = one, two
        y = torch.cat([left, right], 1)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (left, right), (to_left, to_right) = ctx.saved_tensors[0].chunk(2, 1), gradient.chunk(2, 1)
        right, to_left = Coupled.back(ctx.two, left, right, to_left, to_right)
        left, to_right = Coupled.back(ctx.one, right, left, to_right, to_left)
        return None, None, torch.cat([to_left, to_right], 1)

    @staticmethod
    def back(layer: Any, x: Tensor, y: Tensor, to_x: Tensor, to_y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = layer(x)
        torch.autograd.backward(out, to_y)
        return y - out.detach(), to_x + x.grad


class Reversible(Net):
    """Two layers in each Function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH // 2) for _ in range(4))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for one, two in zip(self.layers[::2], self.layers[1::2], strict=True):
            h = Coupled.apply(one, two, h)
        return h


class InsideCheckpoints(Own):
    reentrant = False

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = checkpoint(Again.apply, layer, h, use_reentrant=self.reentrant)
        return h


class InsideReentrant(InsideCheckpoints):
    reentrant = True


class AroundCheckpoints(Own):
    reentrant = False

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = Again.apply(lambda h, layer=layer: checkpoint(layer, h, use_reentrant=self.reentrant), h)
        return h


class AroundReentrant(AroundCheckpoints):
    reentrant = True


class InLayers(Net):
    """A Function, and backward passes, entirely inside a layer; by a name of its own."""

    class block(Block):
        again = staticmethod(Again.apply)
        behind = staticmethod(Behind.apply)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(super().forward, self.behind(super().forward, x))


class FrozenFirst(Own):
    """Nothing comes back through the first layers, on one device neither; there is a cut inside the Function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(Block(WIDTH // 2) for _ in range(2)), Block(), Block()])

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = Coupled.apply(*self.layers[:2], h)
        for layer in self.layers[2:]:
            h = Again.apply(layer, h.requires_grad_())
        return h


EXACT = [Own, OwnWithWeights, OwnByVjp, OwnStored, OwnBehind, OwnScaled, ScaledInLayers, OwnNested, Residual, Prepared,
         InsideCheckpoints, InsideReentrant, AroundCheckpoints, AroundReentrant, InLayers, FrozenFirst]  # fmt: skip
RUNS = [
    {"ranks": 2},
    {"ranks": 4, "schedule": "gpipe"},
    {"ranks": 2, "schedule": "interleaved", "recompute": "always"},
    {"ranks": 2, "schedule": "zero_bubble"},
    {"ranks": 1, "stages": 4},
]


def label(run: dict[str, Any]) -> str:
    return "-".join(map(str, run.values()))


@pytest.mark.parametrize("run", RUNS, ids=label)
@pytest.mark.parametrize("net", EXACT)
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
