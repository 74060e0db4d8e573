"""LightningModules and data of the strategy's tests: ordinary user code that knows no pipeline."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 12, 4


class Lit(L.LightningModule):
    """A classifier with most of what users write in steps and hooks.

    Attributes:
        counts: whether the training step changes attributes, which it may not with several pipes.
    """

    counts = True

    def __init__(self, width: int = 16, lr: float = 0.05, optimizer: str = "adam") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(FEATURES, width)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, CLASSES)
        )
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=CLASSES)
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=CLASSES)
        self.val_auroc = torchmetrics.classification.MulticlassAUROC(num_classes=CLASSES)
        self.seen_before_layers = torchmetrics.SumMetric()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.train_losses: list[Tensor] = []
        self.val_losses: list[Tensor] = []
        self.rows = 0
        self.example_input_array = torch.zeros(2, FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.embed(x.flatten(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.counts:
            self.rows += len(x)
            self.steps += 1
        self.seen_before_layers.update(len(x))
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        if self.counts:
            self.train_losses.append(loss.detach())
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("rows", float(len(y)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log_dict({"smallest": logits.min(), "largest": logits.max()}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.val_losses.append(loss)
        self.val_accuracy.update(logits, y)
        self.val_auroc.update(logits, y)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack(self.val_losses).mean())
        self.log("val_auroc", self.val_auroc.compute())
        self.val_auroc.reset()
        self.val_losses.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, eps=1e-3, weight_decay=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def dataset(length: int, seed: int = 3) -> TensorDataset:
    """Inputs with a class that depends on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 3, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.flatten(1)[:, :4] * 2 + x.flatten(1)[:, 4:8]).argmax(1))


class Data(L.LightningDataModule):
    """Shuffled training data with a short last batch, two validation batches."""

    def __init__(self, length: int = 28, batch_size: int = 8, workers: int = 0) -> None:
        super().__init__()
        self.length, self.batch_size, self.workers = length, batch_size, workers

    def train_dataloader(self) -> DataLoader:
        return DataLoader(dataset(self.length), batch_size=self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(dataset(12, seed=4), batch_size=self.batch_size, num_workers=self.workers)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()
