"""Programs that average or change parameters while they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.state_programs import BATCH_WHOLE, MICRO_BATCHES, STALE, WIDTH, Base, program


class Taught(Base):
    """A head behind the layers, and a teacher of it."""

    remedy = "TeacherInAHook"

    def make(self) -> None:
        self.teacher, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        for mine, own in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.mul_(0.9).add_(0.1 * own)

    def behind(self, out: Tensor) -> Tensor:
        return (self.head(out) - self.teacher(out).detach()).pow(2).mean()


@program(BATCH_WHOLE)
class TeacherInAHook(Taught):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.update()


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class TeacherInTheStep(Taught):
    def behind(self, out: Tensor) -> Tensor:
        self.update()
        return super().behind(out)


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class TeacherByItsData(Taught):
    def update(self) -> None:
        for mine, own in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * own.data

    def behind(self, out: Tensor) -> Tensor:
        self.update()
        return super().behind(out)


@program(MICRO_BATCHES, train=STALE)
class AverageOfLayersInTheStep(Base):
    remedy = "AverageOfLayersInAHook"

    def make(self) -> None:
        self.average = [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]

    def behind(self, out: Tensor) -> Tensor:
        with torch.no_grad():
            for average, layer in zip(self.average, self.layers, strict=True):
                average.mul_(0.9).add_(0.1 * layer.linear.weight.to(average))
        return super().behind(out)

    def seen(self) -> list[Any]:
        return [average.sum() for average in self.average]


@program(BATCH_WHOLE)
class AverageOfLayersInAHook(Base):
    """Each rank has the averages of its own layers."""

    def make(self) -> None:
        self.averages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            for average, layer in zip(self.averages, self.layers, strict=True):
                average.weight.mul_(0.9).add_(0.1 * layer.linear.weight)


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class DecaysWeightsBehind(Base):
    remedy = "DecaysWeightsInAHook"

    def behind(self, out: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].linear.weight.mul_(0.99)
        return super().behind(out)


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class DecaysWeightsByTheirData(Base):
    remedy = "DecaysWeightsInAHook"

    def before(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.linear.weight.data.mul_(0.99)
        return x


@program(BATCH_WHOLE)
class DecaysWeightsInAHook(Base):
    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            for layer in self.layers:
                layer.linear.weight.mul_(0.99)
