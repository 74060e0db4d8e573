"""Programs whose layers, hooks and modules outside the layers reach state elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.support.state_programs import BATCH_WHOLE, MICRO_BATCHES, STALE, WIDTH, Base, Layer, program


class Reaching(Layer):
    """Knows another module, and reads it or sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.sets, self.count = list[Any](), False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for other in self.other:
            if self.sets:
                other.count += 1
            else:
                x = x * (1 + 0.1 * other.count)
        return super().forward(x)


class Reached(Base):
    layer = Reaching
    of, at, sets = 3, 0, False

    def make(self) -> None:
        self.count = 0
        self.layers[self.of].other, self.layers[self.of].sets = [self.layers[self.at]], self.sets


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.count", evaluate=r"self\.layers\.\d\.count")
class ReadsALayerBehindIt(Reached):
    pass


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.count", evaluate=r"self\.layers\.\d\.count", evaluate_chimera=STALE)
class ReadsALayerAhead(Reached):
    of, at = 0, 3


@program(MICRO_BATCHES, train=r"self\.layers\.\d\.count", evaluate=r"self\.layers\.\d\.count")
class SetsAnotherLayer(Reached):
    sets = True


@program(MICRO_BATCHES, train=r"self\.count", evaluate=r"self\.count")
class SetsItsOwner(Reached):
    of, sets = 0, True

    def make(self) -> None:
        super().make()
        self.layers[self.of].other = [self]


@program(MICRO_BATCHES, train_chimera=STALE)
class TheLastLayerSetsItsOwner(SetsItsOwner):
    of = 3

    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * (1 + 0.01 * self.count)


class ReachesItsOwner(Reached):
    def make(self) -> None:
        self.count = 0
        for layer in self.layers:
            layer.other = [self]


@program(MICRO_BATCHES, train=r"self\.(layers\.\d\.)?count")
class LayersReadACounter(ReachesItsOwner):
    def behind(self, out: Tensor) -> Tensor:
        self.count += 1
        return super().behind(out)


@program(BATCH_WHOLE, train_chimera=r"self\.layers\.\d\.count")
class LayersReadTheGlobalStep(ReachesItsOwner):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count = self.global_step


@program(MICRO_BATCHES, train_chimera=STALE)
class LayersReadTheBatch(ReachesItsOwner):
    """Each stage computes by itself what the layers read, before the layers and between them."""

    mixes = True

    def before(self, x: Tensor) -> Tensor:
        self.count = 1 + float(x.mean())
        return x

    def between(self, hidden: Tensor) -> Tensor:
        self.count = 2 * self.count
        return hidden


class Hooked(Base):
    def make(self) -> None:
        self.gain = 1.0
        self.hook()

    def hook(self) -> None:
        self.layers[0].register_forward_hook(lambda module, given, result: result * self.gain)

    def behind(self, out: Tensor) -> Tensor:
        self.gain *= 0.9
        return super().behind(out)


@program(MICRO_BATCHES, train=STALE)
class HookOfALayer(Hooked):
    pass


@program(MICRO_BATCHES, train=STALE)
class HookOfAPart(Hooked):
    def hook(self) -> None:
        self.layers[0].linear.register_forward_hook(lambda module, given, result: result * self.gain)


class Outside(nn.Module):
    """Counts its calls outside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 0.01 * self.calls)


@program(MICRO_BATCHES, train_chimera=STALE)
class OutsideModuleCounts(Base):
    def make(self) -> None:
        self.stem, self.head = Outside(), Outside()

    def before(self, x: Tensor) -> Tensor:
        return self.stem(x)  # type: ignore[no-any-return]

    def behind(self, out: Tensor) -> Tensor:
        return super().behind(self.head(out))
