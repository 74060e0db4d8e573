"""What steps leave in attributes: undone, or passed on."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.module_state import apply, check_portable
from lightning_pipe.intercept.snapshot import Change, Snapshot


class Meter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.sum, self.count, self.history = 0.0, 0, []

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.history.append(value)


class Module(nn.Module):
    """Keeps state in every form that users keep it in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.embed = nn.Embedding(3, 3)
        self.inner = Inner()
        self.outs: list[Tensor] = []
        self.same = self.outs
        self.count, self.rate, self.flag = 0, 0.5, False
        self.by_key: defaultdict[str, list[float]] = defaultdict(list)
        self.counter: Counter[str] = Counter()
        self.recent: deque[float] = deque(maxlen=2)
        self.names: set[str] = set()
        self.nested = {"a": [{"b": 1}]}
        self.meter = Meter()
        self.total = torch.zeros(2)
        self.array = np.zeros(2)
        self.gone: int | None = 1
        self.register_buffer("average", torch.zeros(3))

    def step(self, value: float) -> None:
        self.outs.append(torch.tensor(value))
        self.count += 1
        self.rate *= 0.5
        self.flag = True
        self.by_key["k"].append(value)
        self.counter["seen"] += 1
        self.recent.append(value)
        self.names.add(str(value))
        self.nested["a"][0]["b"] += 1
        self.meter.update(value)
        self.total += value
        self.array += value
        self.average.mul_(0.9).add_(value)
        self.inner.calls += 1
        self.__dict__.pop("gone", None)
        self.new = torch.ones(3) * value


class Inner(nn.Module):
    """A module without parameters that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


def content(module: Module) -> dict[str, Any]:
    """All of it, comparable."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    values.update(meter=vars(module.meter), average=module.average, calls=module.inner.calls)
    return {name: str(value) for name, value in values.items()}


@pytest.fixture
def module() -> Module:
    return Module()


def state_of(module: Module) -> LayerState:
    return LayerState(module, [*module.layers.named_children(), ("embed", module.embed)])


def captured(module: Module) -> Snapshot:
    return Snapshot(state_of(module).around)


def test_changes_make_another_module_equal(module: Module) -> None:
    other = Module()
    for each in (module, other):
        each.step(1.0)
    memory = captured(module)
    module.step(2.0)
    module.step(3.0)
    check_portable(memory.changes())
    apply(memory.changes(), state_of(other))
    assert content(other) == content(module)
    assert other.same is other.outs
    assert len(other.outs) == 3


def test_layers_and_modules_that_really_run_keep_their_state(module: Module) -> None:
    memory = captured(module)
    module.layers[0].calls = 1
    module.embed.calls = 1
    memory.undo()
    assert module.layers[0].calls == module.embed.calls == 1
    assert memory.changes() == []


def test_views_of_tensors_on_the_other_side_stay_views(module: Module) -> None:
    other = Module()
    view = other.total.view(1, 2)
    memory = captured(module)
    module.total += 3.0
    apply(memory.changes(), state_of(other))
    assert torch.equal(view, torch.full((1, 2), 3.0))


def test_changes_are_named_as_code_writes_them() -> None:
    buffer = Change("set", ("layers.1", "_buffers", "t"), 1.0)
    assert buffer.written == "self.layers.1.t"
    assert Change("set", ("", "scale"), 1.0).written == "self.scale"
    with pytest.raises(CutError, match=r"`self\.layers\.1\.t`"):
        check_portable([Change("set", ("layers.1", "t"), lambda: None)])
