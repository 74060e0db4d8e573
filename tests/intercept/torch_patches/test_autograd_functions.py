"""Functions with a backward of their own between and inside layers: equal to one device; around layers: refused."""

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
from tests.support.pairs import pairs
from tests.support.small_net import WIDTH, Block, Net, batches

pytestmark = pytest.mark.usefixtures("float64")


class Again(Function):
    """Keeps what it is given alone, and computes again in its backward, with the numbers that it has drawn."""

    @staticmethod
    def forward(ctx: Any, code: Any, x: Tensor) -> Tensor:
        ctx.code, ctx.state = code, torch.get_rng_state()
        ctx.save_for_backward(x)
        return code(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.code(x)
        torch.set_rng_state(before)
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
    """Has a weight as an argument, and returns two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, scale)
        return x * scale, x.detach() * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, other: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * scale + other, (gradient * x).sum(0)


class Own(Net):
    """Functions between the layers; one by a name of its own."""

    again = staticmethod(Again.apply)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        return self.again(torch.sin, h)  # type: ignore[no-any-return]

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            h = layer(self.between(h))
            scaled, twice = Scaled.apply(Same.apply(h), self.scale[number])
            h = scaled + twice.detach() + Same.apply(x[:, :WIDTH] * 0.0)
        return h


class InCheckpoints(Own):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(Again.apply, torch.sin, h, use_reentrant=False)


class Nested(Own):
    def between(self, h: Tensor) -> Tensor:
        return Again.apply(lambda x: Again.apply(torch.sin, Same.apply(x)), h)


class InLayers(Net):
    """A Function entirely inside a layer; by a name of its own."""

    class block(Block):
        again = staticmethod(Again.apply)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(super().forward, x) + Again.apply(super().forward, x)


RUNS = [
    {"ranks": 2},
    {"ranks": 4, "schedule": "gpipe"},
    {"ranks": 2, "schedule": "interleaved", "recompute": "always"},
    {"ranks": 2, "schedule": "zero_bubble"},
    {"ranks": 1, "stages": 4},
]


@pytest.mark.parametrize(
    ("net", "run"), pairs([Own, InCheckpoints, Nested, InLayers], RUNS, lambda net, run: run % 4 == net)
)
def test_functions_between_and_inside_layers_equal_one_device(net: type[Net], run: dict[str, Any]) -> None:
    assert_same(net(), batches(2), layers="layers", **run)


class Noisy(Own):
    """Draws in Functions: in the backward again, or not, since autograd does it."""

    draws_again = False

    def between(self, h: Tensor) -> Tensor:
        def noisy(h: Tensor) -> Tensor:
            return F.dropout(F.dropout(h, 0.3) * torch.rand(WIDTH), 0.2)

        return self.again(noisy, h) if self.draws_again else Once.apply(noisy, h)  # type: ignore[no-any-return]


class Once(Function):
    """Keeps the graph of the forward, which ends at the input."""

    @staticmethod
    def forward(ctx: Any, code: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = code(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *torch.autograd.grad(ctx.y, ctx.x, gradient, retain_graph=True)


class NoisyAgain(Noisy):
    draws_again = True


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_computed_again_draws_the_same_numbers(stages: int) -> None:
    # Threads share torch's generator: one rank at a time.
    data, model, other = batches(), Noisy(), NoisyAgain()
    other.load_state_dict(model.state_dict())
    expected = pipelined(model, data, 3, ranks=1, stages=2, layers="layers")
    found = pipelined(other, data, 3, ranks=1, stages=stages, layers="layers")
    assert found.losses == pytest.approx(expected.losses, abs=1e-12)
    assert_close(found.values, expected.values, 1e-12)


class Around(Net):
    """One Function around each layer."""

    apply = staticmethod(lambda *args: Again.apply(*args))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.apply(layer, h)
        return h


class OtherName(Around):
    """A name that was given to ``apply`` before there was a pipeline."""

    apply = staticmethod(Again.apply)


class AroundAModule(Own):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return Again.apply(self.norm, h)


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


class ChangesInPlace(Own):
    def between(self, h: Tensor) -> Tensor:
        return InPlace.apply(h * 1.0)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Around, r"'Again\.apply' calls 'layers\.0'"),
        (AroundAModule, r"'Again\.apply' calls 'norm'"),
        (OtherName, r"'Again\.apply' calls 'layers\.0'"),
        (ChangesInPlace, r"'InPlace\.apply' changes a tensor in place"),
    ],
)
def test_functions_around_layers_and_changes_in_place_raise(net: type[Net], message: str) -> None:
    with pytest.raises(CutError, match=message):
        pipelined(net(), batches(1), 2, layers="layers", ranks=4)


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


def test_a_reversible_encoder_is_one_layer() -> None:
    data = [{"ids": torch.randint(11, (4, 16))} for _ in range(2)]
    with pytest.raises(CutError, match=r"'_ReversibleFunction\.apply' calls 'model\.reformer\.encoder\.layers\.0'"):
        pipelined(Reformer(), data, 2, layers="model.reformer.encoder.layers")
    assert_same(Reformer(), data, 2, layers=["model.reformer.encoder", "model.lm_head"])
