"""Recomputation: the same gradients to the last bit, less memory, and side effects once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from tests.support.engine_runs import assert_same
from tests.support.pairs import every_second, pairs, slow_but

Recompute = Literal["never", "except_last", "always"]


def gradients_of(
    net: nn.Module,
    parts: list[Any],
    recompute: Recompute,
    *,
    stages: int = 2,
    schedule: str = "gpipe",
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and buffers after one batch on one rank."""
    transport = SingleProcess()
    net = copy.deepcopy(net)
    sequence = find_layers(net, "layers")
    balance = [len(sequence) // stages + (stage < len(sequence) % stages) for stage in range(stages)]
    pipeline = Pipeline(net, sequence, balance, schedules.get(schedule), transport, recompute=recompute)
    pipeline.train(lambda _, part: net(part), parts, [1 / len(parts)] * len(parts), seed=3)
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return grads, {name: b.clone() for name, b in net.named_buffers()}


def assert_same_bits(net: nn.Module, parts: list[Any], recompute: Recompute = "always", **options: Any) -> None:
    """Gradients and buffers are those without recomputation, to the last bit."""
    (expected, buffers), (found, found_buffers) = (
        gradients_of(net, [part.clone() for part in parts], which, **options) for which in ("never", recompute)
    )
    assert found.keys() == expected.keys()
    for name, value in [*expected.items(), *buffers.items()]:
        assert torch.equal({**found, **found_buffers}[name], value), name


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh())
        self.calls = 0

    def forward(self, x: Tensor, scale: int, extra: tuple[Tensor, ...]) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        if not is_recomputing():
            self.calls += 1
        return self.body(x) * scale, scale + 1, (*extra, x)


class Net(nn.Module):
    """Several tensors, tuples and integers between the layers; dropout and batch norm inside and outside."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scale: int = 1
        extra: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x, scale, extra = layer(self.drop(x), scale, extra)
        return self.norm(x + sum(extra)).square().mean() * scale  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("recompute", "schedule"), pairs(["always", "except_last"], ["gpipe", "1f1b", "interleaved"], every_second)
)
def test_gradients_are_the_same_to_the_last_bit(recompute: Recompute, schedule: str) -> None:
    torch.manual_seed(0)
    assert_same_bits(Net(), list(torch.randn(12, 8).tensor_split(3)), recompute, schedule=schedule)


def test_under_autocast_the_same_bits() -> None:
    class Cast(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    torch.manual_seed(0)
    assert_same_bits(Cast(), list(torch.randn(12, 8).tensor_split(3)))


class InLine(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_layer_that_changes_its_input_finds_it_as_it_came() -> None:
    class Changing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return super().forward(torch.sin(x))

    torch.manual_seed(0)
    assert_same_bits(InLine(lambda: Changing(8, 8)), list(torch.randn(6, 8).tensor_split(3)))


class Expanding(nn.Module):
    """``contiguous()`` copies what is expanded: changing the copy leaves the original as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        wide = x[:, :1].expand(-1, 8)
        x = self.layers[1](x)
        x = x + wide.contiguous().add_(1) * wide
        x = self.layers[2](x)
        return (x + wide.contiguous().add_(1) * wide).square().mean()


@pytest.mark.usefixtures("float64")
def test_the_first_run_finds_the_strides_that_came() -> None:
    data = [{"x": torch.randn(size, 8)} for size in (6, 6, 3)]
    assert_same(Expanding(), data, ranks=3, layers="layers", recompute="always", schedule="gpipe")


class Counting(nn.Module):
    """What it computes depends on buffers and attributes in whose place it sets others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.seen, self.calls = [0.0], 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs = self.runs + 1
        self.calls += 1
        self.seen = [*self.seen, float(x.detach().mean())]
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(self.linear(x + self.mean) / float(self.runs + self.calls)) + sum(self.seen)


class Forces(nn.Module):
    """A layer that computes gradients itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.linear(x).tanh()
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("make", "schedule"), pairs([Counting, Forces], ["gpipe", "zero_bubble"], every_second))
def test_the_second_run_finds_what_the_first_one_found(make: Any, schedule: str) -> None:
    data = [{"x": torch.randn(size, 8)} for size in (6, 6, 5)]
    assert_same(InLine(make), data, ranks=2, layers="layers", recompute="always", schedule=schedule)


class Sometimes(nn.Linear):
    """Sets what it computes with for some micro-batches alone."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gain = 1.0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 3:
            self.gain, self.scale = self.gain * 0.5, self.scale * 0.5
        return super().forward(x).tanh() * self.gain * self.scale


class SetsSometimes(InLine):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 3:
            self.layers[3].gain = 0.5
        return super().forward(x)


@pytest.mark.parametrize(("kind", "recompute"), pairs([InLine, SetsSometimes], ["always", "except_last"], every_second))
def test_the_second_run_finds_nothing_that_later_micro_batches_have_set(kind: Any, recompute: Recompute) -> None:
    torch.manual_seed(0)
    net, parts = kind(Sometimes), [torch.randn(size, 8) for size in (4, 3, 4, 3)]
    expected, buffers = gradients_of(net, parts, "never")
    found, found_buffers = gradients_of(net, parts, recompute)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(torch.equal(found_buffers[name], value) for name, value in buffers.items())


def test_statistics_that_begin_to_change_later_are_changed_once() -> None:
    """Behind autograd's back, in a norm that was frozen in the first batch."""
    torch.manual_seed(0)
    transport = SingleProcess()
    net = InLine(lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)))
    pipeline = Pipeline(net, find_layers(net, "layers"), [4, 4], schedules.get("gpipe"), transport, recompute="always")
    net.eval()
    for _ in range(2):
        pipeline.train(lambda _, part: net(part), list(torch.randn(6, 8).tensor_split(2)), [0.5, 0.5])
        net.train()
    assert int(net.layers[0][0].num_batches_tracked) == 2


class Changing(nn.Module):
    """Changes in place what it keeps.

    Args:
        change: does so in a forward pass.
        first: the number of samples from which on it does.
    """

    def __init__(self, change: Callable[[Any, Tensor], object], first: int) -> None:
        super().__init__()
        self.linear, self.change, self.first = nn.Linear(8, 8), change, first
        self.items, self.table, self.mean = list[float](), {"n": 0}, torch.zeros(8)
        self.book = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.uses = nn.Parameter(torch.zeros(8, dtype=torch.long), requires_grad=False)
        self.calls = self.marked = 0
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) >= self.first:
            self.change(self, x.detach())
        return self.linear(x)  # type: ignore[no-any-return]


def append_and_cut(layer: Any, x: Tensor) -> None:
    layer.items.append(float(x.mean()))
    layer.items = layer.items[-1:]


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "items": lambda layer, x: layer.items.append(float(x.mean())),
    "items ": append_and_cut,
    "table": lambda layer, _: layer.table.update(n=layer.table["n"] + 1),
    "mean": lambda layer, x: layer.mean.add_(x.mean(0)),
    "runs": lambda layer, _: layer.runs.add_(1),
    "layers.[04]": lambda layer, x: layer.book.add_(x.mean(0)),
    "layers.[04] ": lambda layer, x: layer.book.data.add_(x.mean(0)),
    " layers.[04]": lambda layer, _: layer.linear.weight.data.mul_(0.9),
    " layers.[04] ": lambda layer, _: layer.linear.weight.data.neg_(),
    "layers.[04]  ": lambda layer, _: layer.uses.add_(1),
    "calls": lambda layer, _: vars(layer).update(calls=layer.calls + 1),
    "marked": lambda layer, _: delattr(layer, "marked"),
    "average": lambda layer, x: nn.functional.batch_norm(x, layer.average, layer.variance, training=True),
}


@pytest.mark.parametrize("stages", slow_but([1, 2], 2))
@pytest.mark.parametrize("first", [3, 4], ids=["always", "later"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_a_layer_changes_in_place_raises(what: str, first: int, stages: int) -> None:
    net, parts = InLine(lambda: Changing(CHANGES[what], first)), [torch.randn(size, 8) for size in (3, 4, 3)]
    with pytest.raises(CutError, match=rf"(\.|'|self\.)({what.strip()})(`|').*is changed in place in a forward pass"):
        gradients_of(net, parts, "always", stages=stages)


def test_what_is_no_number_has_not_changed() -> None:
    class Unknown(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("unknown", torch.full((3,), torch.nan))
            self.spare = nn.Parameter(torch.full((3,), torch.nan))
            self.array = np.full(3, np.nan)

    net, parts = InLine(Unknown), [torch.randn(3, 8)] * 2
    (expected, _), (found, _) = (gradients_of(net, parts, which) for which in ("never", "always"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_made_once_may_be_made_past_modules() -> None:
    class Caching(nn.Linear):
        @cached_property
        def scale(self) -> float:
            return 0.5

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    net, parts = InLine(lambda: Caching(8, 8)), [torch.randn(3, 8)] * 2
    expected, _ = gradients_of(net, parts, "never")
    found, _ = gradients_of(net, parts, "always")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_spectral_norm_raises() -> None:
    make = lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))  # noqa: E731
    with pytest.raises(CutError, match=r"buffer '_[uv]' of a _SpectralNorm is changed in place"):
        gradients_of(InLine(make), [torch.randn(3, 8)] * 2, "always")


def test_a_backward_pass_over_several_layers_inside_the_step_raises() -> None:
    class Penalty(InLine):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            y = self.layers[1](self.layers[0](x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return self.layers[3](self.layers[2](y + slope)).sum()  # type: ignore[no-any-return]

    with pytest.raises(CutError, match="a backward pass inside the step"):
        gradients_of(Penalty(lambda: nn.Linear(8, 8)), [torch.randn(3, 8)] * 2, "always")


def test_user_checkpoints_inside_layers_recompute_as_well() -> None:
    class Inner(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.body, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    reentrant = iter((False, True, False, True))
    # The first layer of a stage gets its input without gradient on one device and in a pipeline alike.
    assert_same_bits(InLine(lambda: Inner(next(reentrant))), list(torch.randn(6, 8).tensor_split(3)))


def test_a_step_that_takes_another_path_the_second_time_raises() -> None:
    class Fickle(InLine):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            x = self.layers[0](x)
            return super().forward(x * 2 if self.runs % 2 else x)

    with pytest.raises(CutError, match=r"another path|same path"):
        gradients_of(Fickle(lambda: nn.Linear(8, 8)), [torch.randn(2, 8)] * 2, "always", stages=2, schedule="gpipe")


def closure() -> Callable[[], float]:
    box = [0.0]

    def count() -> float:
        box[0] += 1.0
        return box[0]

    return count


OWN: dict[str, Callable[[], Callable[[], Any]]] = {
    "iterator": lambda: partial(next, itertools.count(1.0)),
    "generator": lambda: partial(torch.rand, (), generator=torch.Generator().manual_seed(1)),
    "numpy": lambda: np.random.default_rng(1).random,
    "closure": closure,
    "data": lambda: torch.ones(()).data.mul_(2).mul_,
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("own", OWN)
def test_a_layer_that_computes_something_else_the_second_time_raises(own: str, stages: int) -> None:
    class Takes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.take = (OWN[own](),)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.01 * float(self.take[0](2.0) if own == "data" else self.take[0]()))

    with pytest.raises(CutError, match="left other values"):
        gradients_of(InLine(Takes), [torch.randn(3, 8)] * 2, "always", stages=stages)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("recompute", slow_but(["never", "always"], "always"))
def test_encoders_and_decoders_of_bart(recompute: Recompute) -> None:
    """Caches are on by default, as in the zoo of models; the step makes a new one each time it runs."""
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"vocab_size": 50, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    off = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
    model = hf.BartForConditionalGeneration(hf.BartConfig(max_position_embeddings=16, **sizes, **off))
    ids = torch.randint(2, 50, (5, 9))
    batches = [{"input_ids": ids, "labels": ids}] * 2
    layers = ["model.encoder.layers", "model.decoder.layers"]
    assert_same(model, batches, micro_batches=2, ranks=4, layers=layers, recompute=recompute, schedule="gpipe")
