"""Backward hooks act where, as often and on what they act on one device, or raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules.module import register_module_full_backward_hook

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_outcome, pipelined, single_device
from tests.support.pairs import pairs, slow_but
from tests.support.small_net import Block, Net, batches

pytestmark = pytest.mark.usefixtures("float64")

RUNS = [
    {"ranks": 2},
    {"ranks": 4, "schedule": "gpipe"},
    {"ranks": 2, "schedule": "interleaved", "recompute": "always"},
    {"ranks": 2, "schedule": "zero_bubble"},
]
SEEN: list[float] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def half(gradient: Tensor) -> Tensor:
    SEEN.append(float(gradient.norm()))
    return 0.5 * gradient


def halves(gradients: Any) -> Any:
    return tuple(each if each is None else half(each) for each in gradients)


def before(module: nn.Module, gradients: Any) -> Any:
    return halves(gradients)


def behind(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return None if all(each is None for each in inputs) else halves(inputs)


class PreHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_full_backward_pre_hook(before)


class FullHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_full_backward_hook(behind)


class Chain(Net):
    """The layers are a module that the cut divides; a subclass says what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]
        self.register(self.layers)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return self.layers(h)  # type: ignore[operator,no-any-return]

    def register(self, module: Any) -> None: ...


class ForwardHooks(Chain):
    """Return something else, at the cut as well, and hook it: the remedy for backward hooks of layers."""

    def register(self, module: Any) -> None:
        for each in (module, *module):
            each.register_forward_hook(lambda module, args, result: result * 2 + args[0])
            each.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
            each.register_forward_hook(lambda module, args, result: result.register_hook(half) and None)


class HooksInLayers(Net):
    """On modules inside layers, which zero bubble's halves both go through, and inside a module before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(self.embed)  # type: ignore[assignment]
        for part in (self.embed[0], *(layer.linear for layer in self.layers)):  # type: ignore[index]
            part.register_full_backward_hook(behind)
            part.register_full_backward_pre_hook(before)


class BetweenLayers(Net):
    """On tensors at the cut, needed again after the last layer."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h
        for layer in self.layers:
            h = layer(h) + first
            h.register_hook(half)
        return h * first


class OnNodes(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            h.grad_fn.register_prehook(halves)
        return h


class OnSeveral(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            a = layer(h)
            h = a * 2
            register_multi_grad_hook([a, h], lambda gradients: SEEN.extend(float(each.norm()) for each in gradients))
            register_multi_grad_hook([a, h], lambda gradient: SEEN.append(float(gradient.norm())), mode="any")
        return h


class InsideLayers(Net):
    """On what a layer computes, on what it is given, and on nodes."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(half)
            y = self.linear(x)
            y.register_hook(half)
            z = self.linear(torch.tanh(y))
            z.grad_fn.register_prehook(halves)
            z.grad_fn.register_hook(lambda inputs, outputs: halves(inputs))
            return torch.tanh(z)


class OfSavedTensors(Net):
    """Tensors that are fetched from where they were put away, and are there no more."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            away: list[Tensor] = []

            def fetch(number: int) -> Tensor:
                fetched, away[number] = away[number], torch.empty(0)
                half(fetched)
                return fetched

            with saved_tensors_hooks(lambda tensor: (away.append(tensor), len(away) - 1)[1], fetch):
                return super().forward(x)


EXACT = [ForwardHooks, HooksInLayers, BetweenLayers, OnNodes, OnSeveral, InsideLayers, OfSavedTensors]


def check(net: type[Net], run: dict[str, Any]) -> None:
    model, data = net(), batches(2)
    expected = single_device(model, data, 3)
    seen = sorted(SEEN)
    assert seen
    SEEN.clear()
    found = pipelined(model, data, 3, layers="layers", **run)
    assert sorted(SEEN) == pytest.approx(seen, rel=1e-9)
    assert_outcome(found, expected)


@pytest.mark.parametrize(
    ("net", "run"), pairs(EXACT, RUNS, lambda net, run: (net, run) in ((0, 0), (1, 3), (2, 2), (4, 0), (6, 3)))
)
def test_backward_hooks_act_as_on_one_device(net: type[Net], run: dict[str, Any]) -> None:
    check(net, run)


def test_hooks_of_all_modules_raise() -> None:
    handle = register_module_full_backward_hook(behind)
    try:
        with pytest.raises(CutError, match="that is no part of a layer has a full backward hook"):
            pipelined(Net(), batches(1), 2, layers="layers", **RUNS[0])
    finally:
        handle.remove()


def test_hooks_of_modules_act_where_all_layers_are_together() -> None:
    check(FullHooks, {"ranks": 1, "stages": 1})


class FullHookOfAll(Chain):
    def register(self, module: Any) -> None:
        module.register_full_backward_hook(behind)


class TooLate(Net):
    """Earlier stages use the tensor as well: neither they nor the last one have its whole gradient."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        out = super().body(h, x) * h
        h.register_hook(half)
        return out


class OnBothSides(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        out = super().body(h, x) * h
        register_multi_grad_hook([h, out], lambda gradients: None)
        return out


class OnParameters(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.head.weight.register_hook(half)
        return super().forward(x, y)


class OnParametersLater(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.head.weight.register_post_accumulate_grad_hook(lambda weight: None)
        return super().forward(x, y)


_PART = "a backward hook is registered on a tensor that an earlier stage computes"


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (FullHookOfAll, "a Sequential that is no part of a layer has a full backward hook"),
        (FullHooks, "a Block that is no part of a layer has a full backward hook"),
        (PreHooks, "a Linear that is no part of a layer has a full backward hook"),
        (TooLate, _PART),
        (OnBothSides, _PART),
        (OnParameters, "the step calls register_hook of a parameter"),
        (OnParametersLater, "the step calls register_post_accumulate_grad_hook of a parameter"),
    ],
)
def test_hooks_that_cannot_act_raise(net: type[Net], message: str) -> None:
    with pytest.raises(CutError, match=message):
        pipelined(net(), batches(2), 3, layers="layers", **RUNS[1])


class Remedies(Net):
    """What the errors advise: on the tensor that goes into the layers, and on one made from it."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h.register_hook(half)
        again = h * 1.0
        out = super().body(h, x)
        late = again * 1.0
        late.register_hook(half)
        return out * late


@pytest.mark.parametrize("run", slow_but(RUNS, RUNS[2]), ids=lambda run: "-".join(map(str, run.values())))
def test_what_the_errors_advise_works(run: dict[str, Any]) -> None:
    check(Remedies, run)


class Retains(Net):
    """The gradients of a layer's tensors are read once its backward has run."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.retain_grad()
            self.linear.weight.kept = y
            return torch.tanh(y)


def test_retained_gradients_count_once() -> None:
    model, data = Retains(), batches(1)
    found: dict[str, Tensor] = {}

    def look(pipeline: Any, module: Any) -> None:
        mine = {name for name, _ in pipeline.local_parameters()}
        for number, layer in enumerate(module.layers):
            if f"layers.{number}.linear.weight" in mine:
                found[str(number)] = layer.linear.weight.kept.grad

    pipelined(model, data, 1, layers="layers", schedule="zero_bubble", between=look)
    single = Retains()
    single.load_state_dict(model.state_dict())
    single(**data[0]).backward()
    assert len(found) == 4
    for number, layer in enumerate(single.layers):
        torch.testing.assert_close(found[str(number)], layer.linear.weight.kept.grad, rtol=0.0, atol=1e-12)
