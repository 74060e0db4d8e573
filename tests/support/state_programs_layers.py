"""Programs whose layers keep state, or whose step sets it in layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.state_programs import (
    BATCH_WHOLE,
    EQUAL,
    MICRO_BATCHES,
    ONE_STAGE,
    STALE,
    WIDTH,
    Base,
    Dropping,
    Layer,
    program,
)


class Auxiliary(Layer):
    aux_loss: Any

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.keep(out.pow(2).mean() + 0.1 * self.linear.weight.pow(2).sum())
        return out

    def keep(self, loss: Tensor) -> None:
        self.aux_loss = loss


@program(BATCH_WHOLE)
class AuxiliaryLosses(Base):
    """In the place of nothing, of a list, and where there was no attribute."""

    layer = Auxiliary

    def make(self) -> None:
        self.layers[0].aux_loss, self.layers[1].aux_loss = None, []

    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) + sum(layer.aux_loss for layer in self.layers)


class Appending(Auxiliary):
    def __init__(self) -> None:
        super().__init__()
        self.losses = list[Tensor]()

    def keep(self, loss: Tensor) -> None:
        self.losses.append(loss)


IN_PLACE = "is changed in place in a forward pass"
APPENDED = r"`self\.layers\.\d\.losses` is read where it has no value(.|\n)*`self\.aux = tensor`"


@program(
    MICRO_BATCHES,
    train=APPENDED,
    train_chimera=r"self\.layers\.\d\.losses",
    train_recompute=IN_PLACE,
    evaluate=APPENDED,
)
class AuxiliaryLossesInLists(Base):
    remedy = "AuxiliaryLosses"

    layer = Appending

    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) + sum(layer.losses[-1] for layer in self.layers)


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class CountingLayers(Base):
    layer = Counting

    def calls(self, *numbers: int) -> float:
        return 0.1 * sum(self.layers[number].calls for number in numbers)


@program(MICRO_BATCHES, train_chimera=STALE)
class LayersCount(CountingLayers):
    pass


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.calls", evaluate=r"self\.layers\.\d\.calls")
class CountsOfLayersBehind(CountingLayers):
    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * (1 + self.calls(0, 1, 2, 3))


@program(MICRO_BATCHES, train_chimera=r"self\.layers\.\d\.calls")
class CountOfTheLastLayerBehind(CountingLayers):
    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * (1 + self.calls(3))


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.calls", evaluate=r"self\.layers\.\d\.calls")
class CountOfTheLastLayerBefore(CountingLayers):
    def before(self, x: Tensor) -> Tensor:
        return x * (1 + self.calls(3))


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.calls", evaluate=r"self\.layers\.\d\.calls")
class CountsOfLayersInAHook(CountingLayers):
    def seen(self) -> list[Any]:
        return [self.calls(0, 1, 2, 3)]


@program(
    MICRO_BATCHES,
    train=r"self\.layers\.\d\.calls",
    train_1f1b=EQUAL,
    train_recompute=EQUAL,
    evaluate_interleaved=r"self\.layers\.\d\.calls",
)
class CountsOfLayersLogged(CountingLayers):
    def behind(self, out: Tensor) -> Tensor:
        self.log("calls", float(self.layers[2].calls), on_step=True, on_epoch=False)
        return super().behind(out)


class Keeping(Layer):
    """Computes with what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.table, self.state = [0.0], {"n": 0}, None

    def forward(self, x: Tensor) -> Tensor:
        self.items.append(float(x.detach().mean()))
        self.table["n"] += 1
        out = super().forward(x) * (1 + 0.01 * (sum(self.items) + self.table["n"]))
        out = out if self.state is None else out + 0.1 * self.state
        self.state: Any = out.detach().mean(0)
        return out


class KeepingAnew(Keeping):
    """The same, with other values in the place of those that it has kept."""

    def forward(self, x: Tensor) -> Tensor:
        self.items, self.table = [*self.items], {**self.table}
        return super().forward(x)


@program(MICRO_BATCHES, train_chimera=STALE, train_recompute=IN_PLACE)
class LayersKeep(Base):
    mixes = True
    layer = Keeping


@program(MICRO_BATCHES, train_chimera=STALE)
class LayersKeepAnew(Base):
    mixes = True
    layer = KeepingAnew


@program(MICRO_BATCHES, train_chimera=STALE, train_recompute=IN_PLACE)
class StateOfLayersReset(Base):
    mixes = True
    layer = Keeping

    def before(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.items, layer.state = [], None
        return x


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.items", evaluate=r"self\.layers\.\d\.items")
class StateOfLayersResetBehind(Base):
    mixes = True
    layer = Keeping

    def behind(self, out: Tensor) -> Tensor:
        for layer in self.layers:
            layer.items.clear()
        return super().behind(out)


@program(
    MICRO_BATCHES,
    train=r"self\.layers\.\d\.state",
    train_chimera=r"self\.layers\.\d\.items",
    train_recompute=IN_PLACE,
    evaluate=r"self\.layers\.\d\.state",
)
class TensorOfALayerInAHook(Base):
    mixes = True
    layer = Keeping

    def seen(self) -> list[Any]:
        return [self.layers[0].state.sum()]


class Lazy(Layer):
    """Makes a mask in its first call."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, dtype=x.dtype, device=x.device)
        return super().forward(x) * self.mask


@program(BATCH_WHOLE)
class LazyMasks(Base):
    layer = Lazy


class Buffered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls.item())


@program(MICRO_BATCHES, train_chimera=STALE, train_recompute=IN_PLACE)
class LayersCountInBuffers(Base):
    layer = Buffered


# ------------------------------------------------------------------ what the step sets in layers


@program(ONE_STAGE)
class Dropout(Base):
    layer = Dropping


@program(ONE_STAGE)
class EvalThenTrain(Base):
    layer = Dropping

    def before(self, x: Tensor) -> Tensor:
        self.layers[0].eval()
        self.layers[3].eval()
        return x

    def behind(self, out: Tensor) -> Tensor:
        self.layers.train()
        return super().behind(out)

    def seen(self) -> list[Any]:
        return [layer.training for layer in self.layers]


@program(ONE_STAGE)
class DropRateInAHook(Base):
    layer = Dropping

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in self.layers:
            layer.drop.p = 0.1 + 0.01 * self.global_step


@program(ONE_STAGE, train_chimera=r"self\.layers\.\d\.drop\.p")
class DropRateByTheGlobalStep(Base):
    remedy = "DropRateInAHook"

    layer = Dropping

    def before(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.drop.p = 0.1 + 0.01 * self.global_step
        return x


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.scale")
class ScalesLayers(Base):
    """By their own value, before the layers."""

    remedy = "ScalesLayersInAHook"

    def before(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.scale *= 0.9
        return x


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.scale")
class ScalesLayersBehind(Base):
    remedy = "ScalesLayersInAHook"

    def behind(self, out: Tensor) -> Tensor:
        self.layers[0].scale *= 0.9
        return super().behind(out)


@program(BATCH_WHOLE)
class SetsLayersBeforeAndBehind(Base):
    """Each micro-batch sets first what it computes with."""

    def before(self, x: Tensor) -> Tensor:
        self.layers[0].scale = 0.5
        return x

    def behind(self, out: Tensor) -> Tensor:
        self.layers[0].scale = 1.0
        return super().behind(out)


@program(BATCH_WHOLE)
class ScalesLayersInAHook(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.parts == 0:
            for layer in self.layers:
                layer.scale *= 0.9


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.scale", train_chimera=STALE)
class ScalesLayersByACounter(Base):
    remedy = "ScalesLayersInAHook"

    def make(self) -> None:
        self.count = 0

    def before(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            layer.scale = 1 / self.count
        return x


class Tempered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tau", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.tau * x.detach().mean()


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.tau", evaluate=r"self\.layers\.\d\.tau")
class ShrinksBuffers(Base):
    mixes = True
    remedy = "ShrinksBuffersInAHook"

    layer = Tempered

    def before(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.tau.mul_(0.95)
        return x


@program(MICRO_BATCHES)
class ShrinksBuffersInAHook(Base):
    mixes = True
    layer = Tempered

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.layers[0].tau.mul_(0.95)


class Skipping(Layer):
    def forward(self, x: Tensor, keep: bool = True) -> Tensor:
        return super().forward(x) if keep else x + 0 * super().forward(x)


@program(MICRO_BATCHES, train=STALE)
class ArgumentByACounter(Base):
    layer = Skipping

    def make(self) -> None:
        self.count = 0

    def step(self, x: Tensor) -> Tensor:
        self.count += 1
        for number, layer in enumerate(self.layers):
            x = layer(x, keep=(self.count + number) % 2 == 0)
        return x.pow(2).mean()
