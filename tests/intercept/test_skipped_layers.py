"""Records of calls, and the answers for layers that another stage runs, made from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.intercept.call_record import CallRecord, Same
from lightning_pipe.intercept.layer_calls import LayerCalls, RunCache
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.skipped_layers import SkippedLayers
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.skip import StepStore
from tests.intercept.test_tracker import Uses, tracker

NAMES = ("layers.0", "layers.1")


def run_cache() -> RunCache:
    """That of a rank whose module has no layers."""
    return RunCache(LayerState(nn.Module(), []), Uses(), torch.device("cpu"))


def recorded(
    module: nn.Module, *args: Any, cache: RunCache | None = None, thorough: bool = False
) -> tuple[Any, CallRecord, Tracker]:
    first = tracker()
    first.digest.thorough = thorough
    calls = LayerCalls(
        StageLayers(0, range(1), NAMES, {}),
        first,
        StepStore(),
        cache or run_cache(),
    )
    with first:
        result = calls.run(NAMES[0], (0, 0), module, module.forward, args, {})
    return result, first.calls[-1], first


def answered(call: CallRecord, module: nn.Module, *args: Any) -> tuple[Any, SkippedLayers]:
    second = tracker([call])
    skipped = SkippedLayers(second, StepStore(), run_cache())
    with second, second.paused():
        return skipped.answer(NAMES[0], module, args, {}), skipped


class Several(nn.Module):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Any:
        out = x.sin()
        state["seen"] = out
        self.kept = out * 2
        return {"out": out, "again": out, "same": x, "count": 3}


class Adds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_a_change_in_place_makes_a_placeholder_of_what_was_known() -> None:
    _, call, _ = recorded(Adds(), torch.ones(2))
    assert (call.mutated, call.leaves, call.numbers) == ((0,), (Same(0),), (0,))
    x = torch.ones(2)
    result, _ = answered(call, Adds(), x)
    assert result is x
    assert isinstance(x, Placeholder)
