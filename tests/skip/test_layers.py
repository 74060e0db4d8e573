"""Layers that declare what they stash and pop: torchgpipe's interface."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import skip
from lightning_pipe.skip import Namespace, SkipError, pop, skippable, stash, verify_skippables

pytestmark = pytest.mark.usefixtures("float64")


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return x * 2


@skippable(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("x"))


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def test_layers_work_without_a_pipeline() -> None:
    x = torch.randn(3)
    assert torch.equal(nn.Sequential(Stash(), Plain(), Pop())(x), torch.tanh(2 * x) + x)


def test_namespaces_keep_equal_names_apart() -> None:
    outer, inner = Namespace(), Namespace()
    net = nn.Sequential(Stash().isolate(outer), Stash().isolate(inner), Pop().isolate(inner), Pop().isolate(outer))
    x = torch.randn(3)
    assert torch.equal(net(x), 4 * x + 2 * x + x)
    verify_skippables(net)


def test_a_layer_keeps_its_name_and_state() -> None:
    layer = Stash()
    assert type(layer).__name__ == "Stash"
    assert isinstance(pickle.loads(pickle.dumps(layer.isolate(Namespace()))), Stash)
    assert copy.deepcopy(layer).namespaces == layer.namespaces


def test_undeclared_and_forgotten_names_raise() -> None:
    @skippable(stash=["a"])
    class Undeclared(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("b", x)
            return x

    @skippable(stash=["a"])
    class Forgotten(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x

    with pytest.raises(SkipError, match="'b' without declaring it"):
        Undeclared()(torch.ones(1))
    with pytest.raises(SkipError, match="declares 'a'"):
        Forgotten()(torch.ones(1))
    with pytest.raises(SkipError, match="no earlier layer has stashed it"):
        skip.take("nothing")
    with pytest.raises(SkipError, match="'pair' is a tuple; a skip connection carries one tensor"):
        skip.put("pair", (torch.ones(1), torch.ones(1)))  # type: ignore[arg-type]
    with pytest.raises(SkipError, match="neither stashes nor pops 'y'"):
        Stash().isolate(Namespace(), only=["y"])
    with pytest.raises(SkipError, match="needs names"):
        skippable()
