"""Changes in place outside layers and in them reach all stages, or raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.errors import CutError
from tests.support.engine_runs import assert_same, pipelined
from tests.support.small_net import WIDTH, FilledThroughViews, InPlaceBlock, Net, batches

pytestmark = pytest.mark.usefixtures("float64")


class InPlace(Net):
    """The input of a layer changes in place, and the batch with it; the batch is the target as well."""

    block = InPlaceBlock

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = x * 1.0
        h = x
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(h, x) + F.mse_loss(self.head(h), y)


class Assembled(Net):
    """A buffer of the step's own is filled with derived values before the layers."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        tokens = torch.zeros(len(x), WIDTH)
        tokens[:, :3] = h[:, :3]
        tokens += 0.1
        return super().body(tokens, x)


class FilledByFunctions(Net):
    """Functions write into tensors of the step's own that are not their first argument."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        largest, index = torch.zeros(len(x), 2), torch.zeros(len(x), dtype=torch.long)
        own, table = torch.zeros(len(x), WIDTH), torch.ones(WIDTH, WIDTH)
        torch.max(h.detach(), 1, out=(largest[:, 1], index))
        torch._foreach_add_([own[:]], [h.detach()])
        h = h + F.embedding(index, table, max_norm=0.5)
        return super().body(h, x) * own + largest[:, 1:] * index[:, None] + table.mean(0)


class OwnStatistics(Net):
    """Running statistics of the step's own."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        mean, var = torch.zeros(WIDTH), torch.ones(WIDTH)
        h = F.batch_norm(h, mean, var, None, None, True)
        return super().body(h, x) * var + mean


class ViewChangedByLayer(Net):
    """The first layer changes a view of the batch in place, and of a tensor of the step's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = InPlaceBlock()
        self.layers[1] = InPlaceBlock()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        own = torch.ones(len(x), 2, WIDTH)
        h = self.layers[0](x[:]) + self.layers[1](own[:, 1])
        for layer in self.layers[2:]:
            h = layer(h)
        return F.mse_loss(self.head(h * own.sum(1)), y) + F.mse_loss(h, x)


class SharedMemoryChanged(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        row = h[0]
        for layer in self.layers:
            h = layer(h) + h
        row.add_(1)
        return h + row


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_shared_at_an_earlier_cut_counts_at_later_ones(ranks: int) -> None:
    """Both come to the second stage as copies, and from there to the last one."""
    with pytest.raises(CutError, match="shares its memory"):
        pipelined(SharedMemoryChanged(), batches(), 2, ranks=ranks, layers="layers")


class AliasChanged(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        tokens = torch.zeros(len(x), WIDTH)
        alias = tokens.detach()
        tokens += h.detach()
        return super().body(h, x) + alias


class Takes(Net):
    """A tensor of the step's own takes the memory of an activation, in one of the ways that torch has."""

    def take(self, own: Tensor, h: Tensor) -> None:
        own.set_(h)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        own = torch.zeros(len(x), WIDTH)
        for layer in self.layers:
            h = layer(h)
            self.take(own, h.detach())
        return h * own


class TakesStorage(Takes):
    def take(self, own: Tensor, h: Tensor) -> None:
        own.set_(h.untyped_storage(), 0, h.shape, h.stride())


class Reshapes(Takes):
    def take(self, own: Tensor, h: Tensor) -> None:
        h.mul_(2).unsqueeze_(0)


class Gives(Takes):
    def take(self, own: Tensor, h: Tensor) -> None:
        h.set_(own)
        own.add_(1)


class WritesInVmap(Takes):
    def take(self, own: Tensor, h: Tensor) -> None:
        torch.vmap(lambda to, what: to.add_(what))(own, h)


class Flattened(Net):
    """A layer returns a view of the batch, which is changed in place by the next layer, or after all."""

    changing = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, nn.Unflatten(1, (2, 3)))
        self.layers[self.changing] = InPlaceBlock()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        flat = h = self.layers[0](x).flatten(1)
        for layer in self.layers[1:4]:
            h = layer(h)
        return F.mse_loss(self.layers[4](flat) + h, x)


class FlattenedChangedLater(Flattened):
    changing = 4


class FunctionalNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return super().body(F.batch_norm(h, self.mean, self.var, training=True), x)


class Accumulates(nn.Module):
    """Every layer changes in place a tensor that came in one message with its other input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, total)
        return (x * total).square().mean()


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.detach())
        return torch.tanh(self.linear(x))


def test_tensors_out_of_one_message_do_not_count_as_views_of_each_other() -> None:
    data = [{"x": torch.randn(size, 8)} for size in (6, 6, 5)]
    assert_same(Accumulates(), data, schedule="interleaved", layers="layers")


@pytest.mark.parametrize(
    "model",
    [
        InPlace,
        Assembled,
        FilledThroughViews,
        FilledByFunctions,
        OwnStatistics,
        ViewChangedByLayer,
    ],
    ids=lambda model: model.__name__,
)
def test_equals_one_device(model: type[Net], run: dict[str, Any]) -> None:
    assert_same(model(), batches(), **run)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (AliasChanged, "and another tensor shares its memory"),
        (Takes, "'set_' changes a tensor in place, with or for one that only another stage has"),
        (TakesStorage, "'untyped_storage' needs the value of a tensor that only another stage has"),
        (
            Reshapes,
            "'unsqueeze_' needs the value of a tensor that only another stage has .* leaves of a tensor's shape",
        ),
        (Gives, "'set_' changes a tensor in place"),
        (WritesInVmap, "'add_' changes a tensor in place"),
        (FunctionalNorm, "'batch_norm' changes 'mean' in place before this stage's layers"),
        (Flattened, "an argument or attribute of a layer shares its memory"),
        (FlattenedChangedLater, "another tensor that crosses the cut shares its memory"),
    ],
)
def test_what_cannot_be_served_raises(model: type[Net], message: str) -> None:
    with pytest.raises(CutError, match=message):
        pipelined(model(), batches(), 2, ranks=2, layers="layers")
