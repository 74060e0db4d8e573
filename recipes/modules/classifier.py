"""What the recipes' image classifiers share: a smoothed loss, and the top-1 and top-5 accuracies of validation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from recipes.modules.trained import Trained


class Classifier(Trained):
    """An image classifier; subclasses set ``model``.

    Args:
        classes: number of classes.
        label_smoothing: share of the target that is spread over all classes.
        weight_decay: L2, on convolutions and matrices only.
    """

    model: nn.Module

    def __init__(self, classes: int, label_smoothing: float, weight_decay: float) -> None:
        super().__init__(weight_decay)
        self.label_smoothing = label_smoothing
        self.val_top1 = MulticlassAccuracy(classes, top_k=1, average="micro")
        self.val_top5 = MulticlassAccuracy(classes, top_k=min(5, classes), average="micro")

    def smoothed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss that is trained with."""
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.smoothed_loss(self.model(batch["image"]), batch["label"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, labels = self.model(batch["image"]), batch["label"]
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels), prog_bar=True, sync_dist=True)
        for name, metric in (("val_top1", self.val_top1), ("val_top5", self.val_top5)):
            metric.update(logits, labels)
            self.log(name, metric, batch_size=len(labels))
