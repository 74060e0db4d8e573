"""Which parts of layers have hooks, and what hooks see on stages that skip the layer."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.inner_hooks import Unseen
from lightning_pipe.intercept.layer_calls import RunCache


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
    with pytest.raises(CutError, match="'logits' of a ModelOutput"):
        _ = Unseen("ModelOutput").logits
