"""Modules that are evaluated by streams of batches, with their loaders and loggers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

WIDTH, ROWS, SIZE = 6, 23, 4


class Evaluated(L.LightningModule):
    """What users write in evaluation steps and hooks; no hook between two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=WIDTH)
        self.auroc = torchmetrics.classification.MulticlassAUROC(num_classes=WIDTH)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.embed(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss)
        self.accuracy(logits, y)
        self.auroc.update(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("index", float(batch_idx), on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def _log_losses(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())
        self.log("auroc", self.auroc.compute())
        self.auroc.reset()
        self.losses.clear()

    on_validation_epoch_end = on_test_epoch_end = _log_losses

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"class": self(batch[0]).argmax(-1), "row": batch[0][:, 0], "index": batch_idx}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Kept:
    """Something that a step returns, of which the process knows whether anybody keeps it."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        Kept.alive.add(self)


class Large(Evaluated):
    """Returns what must not stay in memory."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.model(self.embed(batch[0]))
        most.append(len(Kept.alive))
        return {"class": batch[1], "kept": Kept()}


most: list[int] = []
"""The number of outputs in memory at each step that came to its end."""


class Counts(Evaluated):
    """What the step computes before the layers depends on what earlier batches have left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.seen += 1
        x, y = batch
        return super().validation_step((x * self.seen, y), batch_idx)


class Keeps(Evaluated):
    """Leaves something in attributes, which nothing reads before the layers but to see that it has not changed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.worst = 0.5, 0.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = super().validation_step((batch[0] * self.scale, batch[1]), batch_idx)
        self.worst = max(self.worst, float(loss))
        self.log("worst", self.worst)
        return loss


class Hooked(Evaluated):
    """Has a hook between two batches, which changes what the next one computes."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("hook", outputs + batch_idx)
        with torch.no_grad():
            self.embed.bias += 1.0


class Doubled(nn.Module):
    """Computes something else in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if self.training else x


class Samples(Evaluated):
    """Puts the layers into training mode for some batches, as for Monte Carlo dropout."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model:
            layer.append(Doubled())

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if batch_idx % 2:
            self.model.train()
        loss = super().validation_step(batch, batch_idx)
        self.model.eval()
        return loss


class Alternates(Samples):
    """The step gives the LightningModule another mode for every batch, and leaves it so."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.train(batch_idx % 2 == 0)
        return Evaluated.validation_step(self, batch, batch_idx)


class Scaled(nn.Linear):
    """A layer with a number that others set."""

    def __init__(self, scale: Any = 1.0) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * self.scale


class Scales(Evaluated):
    """Sets a number in all layers behind the last one, from the first batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Scaled() for _ in range(8)))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        for layer in self.model:
            layer.scale = 1.0 + 0.1 * float(loss)
        return loss


class AsksMetric(Evaluated):
    """Computes from what a metric has counted in earlier batches."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        scale = 1.0 + float(self.accuracy.compute())
        return super().validation_step((batch[0] * scale, batch[1]), batch_idx)


class Moved(Evaluated):
    """Scales batches when they have come to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * 2.0, batch[1])


class Breaks(Evaluated):
    """Fails in one of its layers."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if batch_idx == 3 and self.trainer.global_rank == self.trainer.world_size - 1:
            raise ArithmeticError("the first stage fails in batch 3")
        return super().validation_step(batch, batch_idx)


class Exhausts(Evaluated):
    """Takes from an iterator that ends before the data."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        scale = next(scale for number, scale in enumerate((1.0, 2.0)) if number == batch_idx)
        return super().validation_step((batch[0] * scale, batch[1]), batch_idx)


class Generates(Hooked):
    """Returns what no other process can be given, to a hook that asks for it."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = super().validation_step(batch, batch_idx)
        return (each for each in (loss,))


class ReturnsWeights(Hooked):
    """Returns what another stage has."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        return self.model[0][0].weight


class Steps(DummyLogger):
    """Keeps what is logged for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append({**metrics, "step": step})


class Writer(BasePredictionWriter):
    """Keeps the batches that it is given."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.batches: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *others: Any) -> None:
        self.batches.append((indices, prediction["class"].tolist()))


class Rows(TensorDataset):
    """Counts the rows that were taken; may fail at one of them."""

    def __init__(self, rows: int = ROWS, fails_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        super().__init__(x, x.argmax(1))
        self.taken, self.fails_at = 0, fails_at

    def __getitem__(self, index: int) -> Any:
        self.taken += 1
        if index == self.fails_at:
            raise OSError("this row cannot be read")
        return super().__getitem__(index)


class Stream(IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        return (Rows()[index] for index in range(ROWS))


def loader(**options: Any) -> DataLoader:
    return DataLoader(Rows(**options), batch_size=SIZE)


class SideBySide(Evaluated):
    """Joins the batches of two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().validation_step([torch.cat(pair) for pair in zip(*batch, strict=True)], batch_idx)
