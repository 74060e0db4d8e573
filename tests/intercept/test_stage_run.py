"""Steps of every shape give the numbers of one device, or raise: never a wrong number. The zoo of models has others."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.patches import replaced
from tests.support.engine_runs import assert_close, assert_same, pipelined, single_device
from tests.support.pairs import slow_but
from tests.support.small_net import WIDTH, Carried, Net, ViewsAndChunks, batch, batches

pytestmark = pytest.mark.usefixtures("float64")


class UnusedParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class CastByAutocast(Net):
    """Autocast chooses the type of what is computed outside layers; code that looks at it takes another path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                mixed = h.float() @ self.weight.float()
                bias = torch.full((), 1.0, dtype=mixed.dtype) / 3.0  # no stage gets it from another
                h = layer(h + mixed.double()) + (mixed * (bias if mixed.dtype == torch.bfloat16 else 0.0)).double()
        return h


class CopiesAndSearches(Net):
    """Copies what it has by Python's means, and looks for values that are as many as there are."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            rows, columns = torch.where(h > 0)
            h = layer(h) + 0.1 * copy.deepcopy(h.detach()) + 0.1 * h[rows, columns].sum() + len(rows)
        return h


class KeepsState(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        self.kept = [h]
        for layer in self.layers:
            h = layer(h)
            self.kept.append(h)
        result = sum(self.kept)
        self.kept = []
        return result


class TakesBatchApart(Net):
    """The step changes its batch: the tensors in place, and the container."""

    def forward(self, *, parts: dict[str, Tensor]) -> Any:  # type: ignore[override]
        x, y = parts.pop("x"), parts.pop("y")
        x -= x.mean(0)
        return super().forward(x, y)


def test_a_step_may_take_its_batch_apart(run: dict[str, Any]) -> None:
    model, data = TakesBatchApart(), [batch(6) for _ in range(3)]
    shifted = [{"x": d["x"] - d["x"].mean(0), "y": d["y"]} for d in data]
    plain = Net()
    plain.load_state_dict(model.state_dict())
    whole = single_device(plain, shifted, 1)
    found = pipelined(model, data, 1, call=lambda module, part: module(parts=part), **run)
    assert found.losses == pytest.approx(whole.losses, abs=1e-12)


def test_shapes_may_change_from_batch_to_batch(run: dict[str, Any]) -> None:
    sizes = [7, 7, 2, 7, 1, 2, 9]
    assert_same(Carried(), [batch(samples) for samples in sizes], micro_batches=4, **run)


def test_weight_decay_leaves_parameters_without_gradient_alone(run: dict[str, Any]) -> None:
    def decaying(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5, eps=1e-2)

    assert_same(UnusedParameter(), batches(), optimizer=decaying, **run)


class Detached(Net):
    """The loss of a micro-batch depends on the parameters if its first target is positive."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = super().forward(x, y)
        return loss if y[0] > 0 else loss.detach()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_batch_without_gradients_raises_as_on_one_device(recompute: str) -> None:
    data = batch(6)
    with pytest.raises(ConfigurationError, match="depends on no parameter that is trained"):
        pipelined(Detached(), [{**data, "y": -data["y"].abs()}], 3, layers="layers", recompute=recompute)
    data["y"] = data["y"].abs()
    data["y"][2:4] *= -1
    expected = copy.deepcopy(net := Detached())
    for part in (0, 4):
        (expected(**{name: value[part : part + 2] for name, value in data.items()}) / 3).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    found = pipelined(net, [data], 3, layers="layers", recompute=recompute)
    assert_close(found.values, expected.state_dict(), 1e-12)


@pytest.mark.parametrize(
    "model",
    slow_but(
        [Net, ViewsAndChunks, KeepsState, CastByAutocast, CopiesAndSearches],
        ViewsAndChunks,
        KeepsState,
        CastByAutocast,
    ),
    ids=lambda model: model.__name__,
)
def test_equals_one_device(model: type[Net], run: dict[str, Any]) -> None:
    assert_same(model(), batches(), **run)


def test_a_thread_sees_its_own_run_alone() -> None:
    own: Any = object()
    inner: Any = object()
    seen: list[Any] = []
    with replaced(under_way, "run", own, gated=False):
        other = threading.Thread(target=lambda: seen.append(under_way.run))
        other.start()
        other.join(10)
        assert under_way.run is own
        with replaced(under_way, "run", inner, gated=False):
            assert under_way.run is inner
        assert under_way.run is own
    assert seen == [None]
    assert under_way.run is None
