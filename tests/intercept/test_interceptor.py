"""Wrappers around layers and outside modules: where they are, and that they go."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.interceptor import Interceptor, outside_modules
from lightning_pipe.partition import find_layers
from lightning_pipe.patches import all_replaced
from tests.intercept.test_tracker import Uses


class Head(nn.Module):
    """Has no forward, and holds modules that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 1)
        self.act = nn.ReLU()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.head = nn.ModuleDict({"inner": Head()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head["inner"].out(self.norm(x))


def around(module: nn.Module, layers: Any, *, tells: bool = True) -> Interceptor:
    return Interceptor(module, layers, Uses(), torch.device("cpu"), tells=tells)


def test_the_largest_modules_that_hold_something_are_outside() -> None:
    net = Net()
    assert [name for name, _ in outside_modules(net, list(net.layers))] == ["embed", "norm", "head.inner.out"]


def test_what_is_patched_for_many_batches_is_put_back_behind_the_last_one() -> None:
    net, before = Net(), nn.Module.__setattr__
    interceptor = around(net, find_layers(net, "layers"))
    with interceptor.torch_patched():
        with interceptor.installed():
            assert nn.Module.__setattr__ is not before
        assert nn.Module.__setattr__ is not before
    assert nn.Module.__setattr__ is before


@pytest.mark.parametrize("compiles", [False, True])
def test_wrappers_take_what_forwards_take(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code may ask: generate() leaves out the mask of a model that takes none."""
    net = Net()
    interceptor = around(net, find_layers(net, "layers"))
    parts = [net.layers[0], net.embed, net.norm]
    expected = [inspect.signature(part.forward) for part in parts]
    if not compiles:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    elif "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
    with interceptor.installed():
        assert all("forward" in vars(part) for part in parts)
        assert [inspect.signature(part.forward) for part in parts] == expected


def test_nothing_stays_behind() -> None:
    net = Net()
    before = pickle.dumps(net)
    interceptor = around(net, find_layers(net, "layers"))
    with interceptor.installed():
        assert "forward" in vars(net.layers[0])
    assert pickle.dumps(net) == before
    with pytest.raises(RuntimeError), interceptor.installed():
        net(torch.ones(3, 7))
    assert pickle.dumps(net) == before


def with_config(use_cache: object) -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].config = SimpleNamespace(use_cache=use_cache)
    return module


def test_the_switch_is_put_back_after_an_error() -> None:
    module = with_config(True)

    def fails() -> None:
        with all_replaced(around(module, [], tells=False).caches_off()):
            assert module[0].config.use_cache is False
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert module[0].config.use_cache is True


def test_it_is_told_once_and_only_where_something_is_switched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for caches in (around(with_config(False), []), around(with_config(True), [], tells=False)):
            with all_replaced(caches.caches_off()):
                pass
    caches = around(with_config(True), [])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with all_replaced(caches.caches_off()):
                pass
    assert ["use_cache" in str(one.message) for one in told] == [True]
