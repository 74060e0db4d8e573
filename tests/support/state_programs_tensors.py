"""Programs whose LightningModule changes tensors, arrays and containers of its own."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.state_programs import MICRO_BATCHES, STALE, WIDTH, Base, program
from tests.support.state_programs_own import Counts


@program(MICRO_BATCHES, train_chimera=STALE)
class QueueBehind(Base):
    """As MoCo's."""

    def make(self) -> None:
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def push(self, keys: Tensor) -> None:
        at = int(self.pointer)
        self.queue[at : at + len(keys)] = keys.detach()
        self.pointer[0] = (at + len(keys)) % 8

    def seen(self) -> list[Any]:
        return [self.queue.sum(), self.pointer.sum()]

    def behind(self, out: Tensor) -> Tensor:
        loss = (out @ self.queue.clone().T).pow(2).mean() + super().behind(out)
        self.push(out)
        return loss


@program(MICRO_BATCHES, train=STALE)
class QueueBefore(QueueBehind):
    def before(self, x: Tensor) -> Tensor:
        return x + self.queue.mean(0)


@program(MICRO_BATCHES, train_chimera=STALE)
class Centred(Base):
    """DINO's centre: read and changed behind the layers."""

    def make(self) -> None:
        self.register_buffer("centre", torch.zeros(1, WIDTH))

    def behind(self, out: Tensor) -> Tensor:
        loss = (out - self.centre).pow(2).mean()
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0, keepdim=True)
        return loss


@program(MICRO_BATCHES, train=STALE)
class CentreBefore(Centred):
    """Changed behind the layers, read before them."""

    def before(self, x: Tensor) -> Tensor:
        return x - self.centre


@program(MICRO_BATCHES, train=STALE)
class FirstMeanBefore(Base):
    """Made of the first samples that come, and kept."""

    mixes = True

    def make(self) -> None:
        self.mean: Any = None

    def before(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        return x - self.mean


@program(MICRO_BATCHES, train_chimera=r"self\.table")
class TableBefore(Base):
    """Made once, alike on all ranks."""

    def make(self) -> None:
        self.table: Any = None

    def before(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH, dtype=torch.float64, device=x.device)
        return x * self.table.to(x.device)


@program(MICRO_BATCHES, train=STALE)
class PartInPlaceBefore(Base):
    mixes = True

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(2, WIDTH))

    def before(self, x: Tensor) -> Tensor:
        self.mean[1].mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean[1]


@program(MICRO_BATCHES, train=STALE)
class RunningMeanBefore(Base):
    mixes = True

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64), persistent=False)

    def before(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


@program(MICRO_BATCHES, train=STALE)
class BufferInPlaceBefore(Base):
    mixes = True

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def before(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


@program(MICRO_BATCHES, train=STALE)
class HistoryBefore(Base):
    mixes = True

    def make(self) -> None:
        self.history: Any = collections.deque(maxlen=3)

    def before(self, x: Tensor) -> Tensor:
        self.history.append(float(x.mean()))
        return x * (1 + sum(self.history))


@program(MICRO_BATCHES, train=STALE)
class HistoryOfTensors(Base):
    mixes = True

    def make(self) -> None:
        self.history = list[Tensor]()

    def before(self, x: Tensor) -> Tensor:
        self.history.append(x.mean(0))
        return x + torch.stack(self.history).mean(0)


@program(MICRO_BATCHES, train=STALE)
class ArrayBefore(Base):
    def make(self) -> None:
        self.array = np.zeros(2)

    def before(self, x: Tensor) -> Tensor:
        self.array += 1
        return x * (1 + 0.1 * float(self.array[0]))


@program(MICRO_BATCHES, train_chimera=r"self\.weights")
class DictionaryBehind(Base):
    def make(self) -> None:
        self.weights, self.names = {"a": 1.0}, set[str]()

    def behind(self, out: Tensor) -> Tensor:
        self.weights["a"] *= 0.9
        self.names.add(f"{self.weights['a']:.6f}")
        return super().behind(out) * self.weights["a"]

    def seen(self) -> list[Any]:
        return [self.weights["a"], len(self.names)]


class ForeignTensor(Counts):
    """A large tensor that changes after a number of calls."""

    starts = 0

    def make(self) -> None:
        super().make()
        self.register_buffer("large", torch.ones(WIDTH, 10_000, dtype=torch.float64), persistent=False)

    def before(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count > self.starts:
            self.large = self.large * 0.99
        return (x @ self.large) @ self.large.T * 1e-4


@program(MICRO_BATCHES, train=STALE)
class LargeTensor(ForeignTensor):
    pass


@program(MICRO_BATCHES, train=STALE)
class LargeTensorLate(ForeignTensor):
    starts = 8
