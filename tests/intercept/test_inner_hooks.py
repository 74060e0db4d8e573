"""Which parts of layers have hooks, and what hooks see on stages that skip the layer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.inner_hooks import Unseen
from lightning_pipe.intercept.layer_calls import RunCache
from tests.support.engine_runs import assert_same
from tests.support.pairs import slow_but
from tests.support.small_net import Block, Net, batches


def nothing(*_: Any) -> None:
    """A hook."""


def cache() -> RunCache:
    nobody: Any = None
    return RunCache(nobody, nobody, nobody)


def test_parts_with_hooks_are_found_and_forgotten() -> None:
    layer, parts = nn.Sequential(nn.Linear(1, 1), nn.ReLU()), cache()
    assert list(parts.hooked(layer)) == []
    layer[1].register_forward_hook(nothing)
    assert parts.hooked(layer) == [("1", layer[1])]
    layer.register_forward_hook(nothing)
    assert parts.hooked(layer) == [("1", layer[1])]  # a hook on the layer itself acts outside it


def test_compiled_parts_have_none() -> None:
    layer = nn.Sequential(nn.Linear(1, 1))
    layer[0].register_forward_hook(nothing)
    layer[0]._compiled_call_impl = nothing
    assert list(cache().hooked(layer)) == []


def test_what_no_message_holds_is_an_error_when_it_is_read() -> None:
    unseen = Unseen("ModelOutput")
    came = pickle.loads(pickle.dumps(unseen))
    assert came == unseen != Unseen("Parameter")
    for each in (unseen, came):
        with pytest.raises(CutError, match="'logits' of a ModelOutput"):
            _ = each.logits


class Parametrized(Block):
    """A part of it is given a parameter, which no other stage has."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.linear)
        for part in self.modules():
            part.register_forward_hook(nothing)


class WithParametrized(Net):
    block = Parametrized


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("run", slow_but([{"ranks": 2}, {"ranks": 4}], {"ranks": 2}))
def test_a_hook_on_a_part_that_is_given_a_parameter_crosses(run: dict[str, Any]) -> None:
    assert_same(WithParametrized(), batches(4), **run)
