"""Training steps that run the layers several times: the loss and gradients of one device that accumulates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError, PipeError
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.threads import thread_world
from lightning_pipe.transport.topology import Topology
from tests.support.engine_runs import assert_close, assert_same, pipelined, single_device
from tests.support.small_net import RUNS, WIDTH, Block, Net, batch, batches

pytestmark = pytest.mark.usefixtures("float64")


class Siamese(Net):
    """Two passes that do not need each other, each with an embedding and a head."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        one, other = (self.head(self.body(self.embed(view), x)) for view in (x, x.flip(1)))
        return F.mse_loss(one, other) + F.mse_loss(one, y)


class Recursion(Net):
    """Three passes, each over what the one before gave."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.embed(x)
        for _ in range(3):
            h = self.body(h, x) + h * x
        return F.mse_loss(self.head(h), y)


class InARow(Net):
    """Every layer is called twice before the next one: that needs no passes."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(layer(h) + h)
        return h


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Drops(Siamese):
    block = Dropping


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(super().forward(x))  # type: ignore[no-any-return]


class Contrasts(Net):
    """Two views of a sample through residual blocks with batch norm; each view must know the other."""

    block = NormBlock

    def forward(self, x: Tensor, y: Tensor) -> Any:
        one, other = (F.normalize(self.body(self.embed(view), x), dim=1) for view in (x, x * 0.9 + 0.1))
        scores = one @ other.T / 0.5
        return F.cross_entropy(scores, torch.arange(len(x))) + 0.0 * self.head(one).sum()


@pytest.fixture(params=[*RUNS, {"ranks": 4}], ids=lambda run: "-".join(map(str, run.values())))
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"layers": "layers", **request.param}


@pytest.mark.parametrize(("model", "passes"), [(Siamese, 2), (Recursion, 3)])
def test_several_passes_equal_one_device(model: type[Net], passes: int, run: dict[str, Any]) -> None:
    assert_same(model(), batches(2), 4, passes=passes, **run)


def test_layers_called_in_a_row_need_no_passes(run: dict[str, Any]) -> None:
    assert_same(InARow(), batches(2), 3, **run)


def test_passes_that_run_again_equal_one_device() -> None:
    assert_same(Siamese(), batches(2), 4, passes=2, layers="layers", schedule="gpipe", recompute="always")


def test_one_pass_too_few_raises() -> None:
    with pytest.raises(CutError, match=r"the step returned before layer 'layers\.0' was called"):
        pipelined(Net(), batches(1), 2, passes=2, layers="layers")


def test_masks_do_not_depend_on_the_division() -> None:
    net, data = Drops(), batches(2)
    alone = pipelined(net, data, 2, ranks=1, layers="layers")
    found = pipelined(net, data, 2, ranks=1, stages=4, passes=2, layers="layers")
    assert found.losses == pytest.approx(alone.losses, abs=1e-12)
    assert_close(found.values, alone.values, 1e-12)


def test_contrast_with_batch_norm_equals_one_device() -> None:
    """The gradients are those of one device; so are the statistics, which one device updates once for each pass."""
    net, data = Contrasts(), [batch(8), batch(8)]
    expected = single_device(net, data, 2)
    alone = pipelined(net, data, 2, ranks=1, layers="layers", deferred_batch_norm=True)
    for ranks, schedule in ((2, "1f1b"), (4, "gpipe")):
        options = {"ranks": ranks, "schedule": schedule, "passes": 2, "deferred_batch_norm": True}
        found = pipelined(net, data, 2, layers="layers", **options)
        assert found.losses == pytest.approx(expected.losses, abs=1e-12)
        assert_close(found.values, alone.values, 1e-12)
        weights = {name: value for name, value in expected.values.items() if "running" not in name}
        weights = {name: value for name, value in weights.items() if "tracked" not in name}
        assert_close({name: found.values[name] for name in weights}, weights, 1e-9)


@pytest.mark.parametrize("schedule", ["zero_bubble", "chimera", "pipedream"])
def test_other_schedules_refuse_several_passes(schedule: str) -> None:
    family = schedules.get(schedule)
    (transport, *_) = thread_world(Topology(ranks=2))
    net = Net()
    with pytest.raises(PipeError, match=f"Schedule '{family.name}' cannot train with passes=2"):
        Pipeline(net, find_layers(net, "layers"), [2, 2], family, transport, passes=2)


def test_one_pass_too_many_raises() -> None:
    with pytest.raises(CutError, match="in one pass more than the 2 that were asked for"):
        pipelined(Recursion(), batches(1), 2, passes=2, layers="layers")
