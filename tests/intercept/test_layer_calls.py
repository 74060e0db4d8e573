"""Layers and outside modules run with a stream of their own, and leave a record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.layer_calls import LayerCalls
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.skip import SkipKey, StepStore, put, stored_in
from tests.intercept.test_skipped_layers import run_cache
from tests.intercept.test_tracker import tracker

NAMES = ("0", "1", "2")
EARLY = SkipKey(None, "early")


def layer_calls(streams: list[Any], routes: dict[SkipKey, int] | None = None) -> LayerCalls:
    @contextmanager
    def isolated(*key: int) -> Iterator[None]:
        streams.append(key)
        yield

    stage = StageLayers(0, range(2), NAMES, routes or {})
    return LayerCalls(stage, tracker(isolated=isolated), StepStore(), run_cache())


def test_a_layer_runs_in_its_stream_and_is_recorded() -> None:
    streams: list[Any] = []
    calls = layer_calls(streams)
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)

    def forward(given: Tensor) -> Tensor:
        assert calls.tracker.surroundings.inside
        return linear(given)

    with calls.tracker:
        result = calls.run("0", (7, 0), linear, forward, (x,), {})
    assert not calls.tracker.surroundings.inside
    assert streams == [(7, 0)]
    [call] = calls.tracker.calls
    assert (call.name, call.numbers, call.differentiable) == ("0", (0,), (True,))
    assert calls.tracker.numbers.of(result) == 0


def test_a_layer_that_fails_leaves_no_record() -> None:
    calls = layer_calls([])

    def forward() -> None:
        raise ValueError("stop")

    with calls.tracker, pytest.raises(ValueError, match="stop"):
        calls.run("0", (0, 0), nn.Identity(), forward, (), {})
    assert not calls.tracker.surroundings.inside
    assert calls.tracker.calls == []


def test_a_skip_connection_with_a_route_gets_a_number_of_its_own() -> None:
    calls, x = layer_calls([], {EARLY: 2}), torch.ones(2, requires_grad=True)

    def stash(given: Tensor) -> Tensor:
        out = given * 2
        put("early", out)
        return out

    with calls.tracker, stored_in(calls._skips):
        calls.run("0", (0, 0), nn.Identity(), stash, (x,), {})
    [call] = calls.tracker.calls
    assert call.stashed == (EARLY,)
    assert calls.routed == {0: 2}
    assert call.numbers == (1, 0)


def test_a_module_that_a_hook_in_a_layer_calls_leaves_the_layer_watched() -> None:
    calls, x = layer_calls([]), torch.ones(2, requires_grad=True)
    calls.tracker.digest.thorough = True
    layer, outside = nn.Identity(), nn.Identity()

    def forward(given: Tensor) -> Tensor:
        layer.kept = given * 2
        with calls.tracker.acting():
            calls.run("head", (-2,), outside, outside.forward, (given,), {})
        return given * 3

    with calls.tracker:
        calls.run("0", (0, 0), layer, forward, (x,), {})
    head, call = calls.tracker.calls
    assert (head.name, head.effects) == ("head", ())
    assert [effect.where for effect in call.effects] == [("", "kept")]
