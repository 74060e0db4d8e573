"""What crosses a cut: which tensors travel, of which kind, and which steps cannot be cut."""

from __future__ import annotations

import math
import pickle
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_same, pipelined
from tests.support.pairs import slow_but
from tests.support.small_net import WIDTH, Block, Net, ViewsAndChunks, batch, batches

pytestmark = pytest.mark.usefixtures("float64")


class Fickle(Block):
    """Leaves something else behind from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x)
        kinds = [out.mT.contiguous().mT + 0, x, x.view_as(x), out.detach(), out.float(), out[:, :1] + 0]
        return out if self.calls % 2 else kinds[self.calls // 2 % len(kinds)]


class Looks(Net):
    """Code between layers that depends on what kind of tensor they return."""

    block = Fickle

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        seen = 0.0
        for layer in self.layers:
            out = layer(h)
            seen += (out is h) + 2 * out.requires_grad + 4 * out.is_contiguous() + 8 * out.shape[1] + out.itemsize / 64
            h = 0.3 * (out + x.to(out.dtype) + h)
        return h * seen / 200  # where the last layer is: what the others left must have looked the same


@pytest.mark.parametrize(
    "run", slow_but([{"ranks": 2}, {"ranks": 4, "schedule": "gpipe"}, {"ranks": 1, "stages": 1}], {"ranks": 2})
)
def test_a_layer_may_return_another_kind_of_tensor_every_time(run: dict[str, Any]) -> None:
    assert_same(Looks(), [batch(6) for _ in range(6)], **run)


class Decides(Net):
    """What the code uses behind the cut follows from a value that it reads before it."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first, *others = self.layers
        kept = h = first(h)
        value = (h.detach() + 100 * x[:, :1]).mean().item()
        for layer in others:
            h = layer(h)
        return h + kept * math.tanh(value) if value > 0 else h


@pytest.mark.parametrize("run", slow_but([{"ranks": 2}, {"ranks": 4, "schedule": "gpipe"}], {"ranks": 2}))
def test_a_value_may_decide_which_tensors_are_used(run: dict[str, Any]) -> None:
    found = [batch(6) for _ in range(6)]
    for each, sign in zip(found, (-1, -1, 1, 1, -1, 1), strict=True):
        each["x"][:, 0] = sign
    assert_same(Decides(), found, **run)


class Letter(StrEnum):
    A = "a"


VALUES: list[Any] = [[math.nan], [np.float64("nan")], [1, True, 1.0, np.float64(1)], [0.0, -0.0], ["a", Letter.A]]


class Valued(Block):
    """Returns a value beside its result: NaN, or one that is equal to that of another call and has another type."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.values, self.calls = values, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        self.calls += 1
        return super().forward(x), self.values[self.calls % len(self.values)]


class TellsValuesApart(Net):
    """The kind of each value counts where the last layer is, and something is alive that nobody needs."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Valued(values) for _ in range(4))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        unused, found = h * 2, list[str]()
        for layer in self.layers:
            h, value = layer(h)
            found.append(repr(value))
        assert unused.shape == h.shape
        return h * sum(place * len(each) for place, each in enumerate(found, start=1))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("run", slow_but([{"ranks": 2}, {"ranks": 3, "balance": [1, 1, 2]}], {"ranks": 2}))
def test_values_of_layers_arrive_as_they_are(values: list[Any], run: dict[str, Any]) -> None:
    assert_same(TellsValuesApart(values), [batch(6) for _ in range(4)], 4, **run)


class ResidualInput(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h) + x
        return h


def test_batches_may_require_gradients(run: dict[str, Any]) -> None:
    parts = batches()
    for part in parts:
        part["x"].requires_grad_()
    assert_same(ResidualInput(), parts, **run)


def test_batches_that_are_computed_from_parameters_raise() -> None:
    parts = batches(1)
    parts[0]["x"] = nn.Linear(WIDTH, WIDTH)(parts[0]["x"])
    with pytest.raises(CutError, match=r"tensor \(4, 6\) of the batch is computed from parameters before the step"):
        pipelined(ResidualInput(), parts, 2, layers="layers")


def test_only_what_is_used_travels_after_the_first_batch() -> None:
    sent: list[int] = []

    def note(pipeline: Any, module: nn.Module) -> None:
        if pipeline.transport.rank == 0:
            sent.append(pipeline.transport.sent)

    pipelined(ViewsAndChunks(), batches(), 1, ranks=2, layers="layers", between=note)
    pipelined(Net(), batches(), 1, ranks=2, layers="layers", between=note)
    one_tensor = 7 * WIDTH * 8
    assert sent[0] == sent[3] == 0, "the first batch goes over the slow path"
    assert sent[4] - sent[3] == pytest.approx(one_tensor, abs=64), "a plain chain sends one tensor"


class Pickles(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            pickle.dumps(h)
        return h


class Penalty(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) + sum(p.pow(2).sum() for p in self.parameters())


class Twice(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return super().body(super().body(h, x), x)


class Special(Tensor):
    """What is added to it counts twice."""

    def __add__(self, other: Any) -> Any:
        return torch.add(self, other, alpha=2)


class KeepsSubclass(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).as_subclass(Special)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h = self.layers[0](h)
        for layer in self.layers[1:]:
            h = layer(h)
        return first + h


class KeepsSparse(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h.to_sparse()
        return first.to_dense() + super().body(h, x)


class OpaqueResult(Net):
    class block(Block):
        def forward(self, x: Any) -> Any:
            return Box(super().forward(x.value if isinstance(x, Box) else x))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h.value  # type: ignore[attr-defined,no-any-return]


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Sometimes(Net):
    """Needs a tensor from before the cut only if the batch says so; the shapes never tell."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h
        h = super().body(h, x)
        return h + first if x[0, 0] > 0 else h


def test_a_tensor_that_was_not_sent_is_missed() -> None:
    quiet, loud = batch(2), batch(2)
    quiet["x"][:, 0], loud["x"][:, 0] = -1, 1
    with pytest.raises(CutError, match="did not send"):
        pipelined(Sometimes(), [quiet, quiet, loud], 1, ranks=2, layers="layers")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Pickles, "pickling needs the value of a tensor that only another stage has"),
        (Penalty, r"'layers.0.linear.weight' is used on rank"),
        (Twice, "called a second time"),
        (KeepsSubclass, r"a Special with torch\.strided crosses the cut before layer 'layers\.2'"),
        (KeepsSparse, r"a Tensor with torch\.sparse_coo crosses the cut before layer 'layers\.2'"),
        (OpaqueResult, "cannot be shown to the next stages"),
    ],
)
def test_what_cannot_be_served_raises(model: type[Net], message: str) -> None:
    with pytest.raises(CutError, match=message):
        pipelined(model(), batches(), 2, ranks=2, layers="layers")
