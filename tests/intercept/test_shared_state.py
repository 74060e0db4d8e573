"""What layers and others hold both is refused when a call changes it, and let alone as long as none does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_same, pipelined
from tests.support.pairs import slow_but

WIDTH = 3


def batches(number: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)} for _ in range(number)]


class State:
    """An object of the user's."""

    def __init__(self) -> None:
        self.calls, self.items = 0, list[float]()


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@dataclass
class Nested:
    """An object that leads to others."""

    state: State = field(default_factory=State)
    counts: dict[str, dict[str, int]] = field(default_factory=lambda: {"inner": {"n": 0}})


def append(shared: Any, x: Tensor) -> float:
    shared.append(float(x.detach().mean()))
    return float(sum(shared))


def count(shared: Any, x: Tensor) -> float:
    shared.calls += 1
    return float(shared.calls)


def add(shared: Any, x: Tensor) -> float:
    shared += 1
    return float(shared.sum())


def count_inside(shared: Any, x: Tensor) -> float:
    shared.counts["inner"]["n"] += 1
    return float(shared.counts["inner"]["n"])


def count_items(shared: Any, x: Tensor) -> float:
    shared["n"] = shared.get("n", 0) + 1
    return float(shared["n"])


def keep(shared: Any, x: Tensor) -> float:
    shared.append(x.detach())
    return float(sum(float(each.sum()) for each in shared))


def remember(shared: Any, x: Tensor) -> float:
    shared.add(round(float(x.detach().mean()), 3))
    return float(len(shared))


Change = Callable[[Any, Tensor], float]
CASES: dict[str, tuple[Callable[[], Any], Change]] = {
    "list": (list, append),
    "deque": (deque, append),
    "dict": (dict, count_items),
    "set": (set, remember),
    "array": (lambda: np.zeros(2), add),
    "object": (State, count),
    "slots": (Slots, count),
    "nested": (Nested, count_inside),
    "tensors": (list, keep),
}


class Layer(nn.Module):
    """Changes what it holds, and computes with it."""

    def __init__(self, change: Change | None, **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change
        for name, each in held.items():
            # past `__setattr__`, which would make parts of modules
            vars(self)[name] = each

    def forward(self, x: Tensor) -> Tensor:
        value = 0.0 if self.change is None else self.change(self.shared, x)
        return torch.tanh(self.linear(x)) * (1 + 0.01 * value)


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module], **held: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        for name, each in held.items():
            setattr(self, name, each)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", slow_but(["1f1b", "interleaved"], "1f1b"))
def test_what_layers_of_several_stages_share_and_change_is_refused(case: str, schedule: str) -> None:
    make, change = CASES[case]
    shared = make()
    model = Model([Layer(change, shared=shared) for _ in range(4)]).double()
    with pytest.raises(CutError, match=r"changes a \w+ in its forward.*`self\.layers\.\d\.shared` and `self\.layers"):
        pipelined(model, batches(), 4, schedule=schedule, layers="layers")


@pytest.mark.parametrize("case", CASES)
def test_what_the_module_holds_too_is_refused(case: str) -> None:
    make, change = CASES[case]
    shared = make()
    layers: list[nn.Module] = [Layer(change, shared=shared), *(Layer(None) for _ in range(3))]
    with pytest.raises(CutError, match=r"`self\.layers\.0\.shared` and `self\.own` share"):
        pipelined(Model(layers, own=shared).double(), batches(), 2, layers="layers")


def test_what_an_outside_module_changes_and_a_layer_holds_is_refused() -> None:
    class Embedded(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.embed(x))

    shared: list[float] = []
    model = Embedded([Layer(None, seen={"of": shared}) for _ in range(4)], embed=Layer(append, shared=shared)).double()
    with pytest.raises(CutError, match=r"'embed' changes a list .*`self\.embed\.shared` and `self\.layers\.0\.seen`"):
        pipelined(model, batches(), 2, layers="layers")


def test_what_is_shared_and_stays_is_let_alone() -> None:
    """A configuration within an object that changes, too."""
    config = {"scale": [1.0, 2.0]}

    def scaled(shared: Any, x: Tensor) -> float:
        shared.items.append(1.0)
        return float(shared.config["scale"][1] + len(shared.items))

    def state() -> State:
        made = State()
        made.config = config  # type: ignore[attr-defined]
        return made

    model = Model([Layer(scaled, shared=state(), config=config) for _ in range(4)], config=config).double()
    assert_same(model, batches(), 2, layers="layers")
    with pytest.raises(CutError, match=r"`self\.layers\.0\.shared` is changed in place in a forward pass"):
        pipelined(model, batches(), 2, layers="layers", recompute="always")


def test_what_comes_to_be_shared_later_is_refused() -> None:
    def share(pipeline: Any, module: Any) -> None:
        module.layers[2].shared = module.layers[0].shared

    model = Model([Layer(append, shared=[]) for _ in range(4)]).double()
    with pytest.raises(CutError, match=r"share"):
        pipelined(model, batches(), 2, layers="layers", between=share)
    pipelined(model, batches(), 2, layers="layers")


class Recurrent(nn.Module):
    """Goes on from a tensor that its last call has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.state
        self.state = 0.9 * self.state + 0.1 * y.detach().mean(0)
        return torch.tanh(y)


def test_a_tensor_that_a_layer_goes_on_from_is_refused_in_several_pipes() -> None:
    """Each pipe would go on from that of its own micro-batches."""
    model = Model([Recurrent() for _ in range(4)]).double()
    assert_same(model, batches(), 4, layers="layers")
    with pytest.raises(CutError, match=r"changes `self\.layers\.\d\.state`, and this schedule has several pipes"):
        pipelined(model, batches(), 4, schedule="chimera", layers="layers")
