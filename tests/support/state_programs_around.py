"""Programs with state elsewhere: configurations, globals, closures, data modules, iterators, random generators."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.support.state_programs import (
    BATCH_WHOLE,
    DATA,
    MICRO_BATCHES,
    ONE_STAGE,
    STALE,
    Base,
    Layer,
    program,
)

COUNT = 0
TABLE = {"gain": 1.0}


class Config:
    """An object of the user's."""

    def __init__(self) -> None:
        self.scale = 1.0

    def shrink(self) -> None:
        self.scale *= 0.9


class Configured(Base):
    remedy = "ConfigInAHook"

    def make(self) -> None:
        self.config = Config()

    def seen(self) -> list[Any]:
        return [self.config.scale]


@program(MICRO_BATCHES, train=STALE, train_chimera=r"self\.config\.scale")
class ConfigBefore(Configured):
    def before(self, x: Tensor) -> Tensor:
        self.config.shrink()
        return x * self.config.scale


@program(MICRO_BATCHES, train_chimera=r"self\.config\.scale")
class ConfigBehind(Configured):
    def behind(self, out: Tensor) -> Tensor:
        self.config.shrink()
        return super().behind(out) * self.config.scale


@program(BATCH_WHOLE)
class ConfigInAHook(Configured):
    def before(self, x: Tensor) -> Tensor:
        return x * self.config.scale

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.parts == 0:
            self.config.shrink()


class WithConfig(Layer):
    config: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale


class SharedConfig(Configured):
    layer = WithConfig

    def make(self) -> None:
        super().make()
        for layer in self.layers:
            layer.config = self.config


@program(BATCH_WHOLE)
class ConfigOfLayers(SharedConfig):
    """Shared, and nobody changes it."""


@program(MICRO_BATCHES, train=STALE, train_chimera=r"self\.config\.scale")
class ConfigOfLayersBehind(SharedConfig):
    def behind(self, out: Tensor) -> Tensor:
        self.config.shrink()
        return super().behind(out)


@program(BATCH_WHOLE, train_chimera=STALE)
class GivesLayersAConfig(SharedConfig):
    """Each has one of its own until the first batch; from then on all share one, which a hook changes."""

    def make(self) -> None:
        super().make()
        for layer in self.layers:
            layer.config = Config()

    def before(self, x: Tensor) -> Tensor:
        if self.global_step == 0:
            self.config = Config()
            self.config.scale = 1.1
            for layer in self.layers:
                layer.config = self.config
        return x

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (batch_idx + 1) % self.parts == 0:
            self.config.shrink()


class Taking(Layer):
    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        return super().forward(x) * (1.0 if context is None else context.scale)


@program(MICRO_BATCHES, train=STALE, train_chimera=r"self\.config\.scale")
class ObjectAsArgument(Configured):
    layer = Taking

    def step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.config)
        self.config.shrink()
        return x.pow(2).mean()


# ------------------------------------------------------------------ globals, closures, data modules


@program(MICRO_BATCHES, train=STALE, evaluate_interleaved=STALE)
class GlobalBefore(Base):
    def make(self) -> None:
        globals()["COUNT"] = 0

    def before(self, x: Tensor) -> Tensor:
        globals()["COUNT"] += 1
        return x * (1 + 0.1 * COUNT)


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class GlobalBehind(GlobalBefore):
    def before(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * COUNT)

    def behind(self, out: Tensor) -> Tensor:
        globals()["COUNT"] += 1
        return super().behind(out)


class ReadsATable(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE["gain"]


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class GlobalInLayers(Base):
    layer = ReadsATable

    def make(self) -> None:
        TABLE["gain"] = 1.0

    def behind(self, out: Tensor) -> Tensor:
        TABLE["gain"] *= 0.9
        return super().behind(out)


@program(MICRO_BATCHES, train=STALE, evaluate_interleaved=STALE)
class ClosureBefore(Base):
    def make(self) -> None:
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted

    def before(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.counted())


@program(MICRO_BATCHES, train=STALE, evaluate_interleaved=STALE)
class ClassBefore(Base):
    factor = 1.0

    def make(self) -> None:
        type(self).factor = 1.0

    def before(self, x: Tensor) -> Tensor:
        type(self).factor *= 0.9
        return x * self.factor


class Counted(L.LightningDataModule):
    """Something in it changes while a step trains."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.difficulty = size, 1.0

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(DATA), self.size)

    val_dataloader = train_dataloader


class OfADataModule(Base):
    remedy = "DataModuleInAHook"

    def data(self, size: int) -> Any:
        return Counted(size)

    def before(self, x: Tensor) -> Tensor:
        return x * self.trainer.datamodule.difficulty  # type: ignore[attr-defined,no-any-return]


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class DataModuleInTheStep(OfADataModule):
    def behind(self, out: Tensor) -> Tensor:
        self.trainer.datamodule.difficulty *= 0.9  # type: ignore[attr-defined]
        return super().behind(out)


@program(BATCH_WHOLE)
class DataModuleInAHook(OfADataModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.parts == 0:
            self.trainer.datamodule.difficulty *= 0.9  # type: ignore[attr-defined]


# ------------------------------------------------------------------ iterators, generators, clocks


OWN = rf"self\.(items|generator)|{STALE}"
"""Runs that nobody compares may take nothing from these; other stages would take other items."""


class Items(Base):
    remedy = "ItemsInAHook"

    def make(self) -> None:
        self.items = iter([1.0 + 0.01 * number for number in range(1000)])


@program(MICRO_BATCHES, train=OWN, evaluate=OWN)
class ItemsBefore(Items):
    def before(self, x: Tensor) -> Tensor:
        return x * next(self.items)


@program(MICRO_BATCHES, train=OWN, evaluate=OWN)
class ItemsBehind(Items):
    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * next(self.items)


@program(BATCH_WHOLE)
class ItemsInAHook(Items):
    """The remedy: a hook takes an item for the batch."""

    item = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.parts == 0:
            self.item = next(self.items)

    def before(self, x: Tensor) -> Tensor:
        return x * self.item


@program(MICRO_BATCHES, train=OWN, evaluate=OWN)
class OwnGeneratorBefore(Base):
    remedy = "ItemsInAHook"

    def make(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def before(self, x: Tensor) -> Tensor:
        return x + torch.rand((), generator=self.generator)


@program(ONE_STAGE)
class NoiseBefore(Base):
    def before(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, dtype=x.dtype, device=x.device)


@program(ONE_STAGE)
class AugmentsBefore(Base):
    def before(self, x: Tensor) -> Tensor:
        x = x.flip(0) if random.random() < 0.5 else x * random.choice([0.5, 2.0])
        return x * float(np.random.rand())


@program(BATCH_WHOLE, train=STALE, evaluate=STALE)
class RankBefore(Base):
    def before(self, x: Tensor) -> Tensor:
        return x * (1 + self.global_rank)
