"""What the recipes' language models share: perplexity in validation."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

from recipes.modules.trained import Trained


class Perplexity(MeanMetric):
    """The exponential of the mean loss over everything seen: e to the cross-entropy per token."""

    @override
    def compute(self) -> Tensor:
        return super().compute().exp()


class LanguageModel(Trained):
    """A language model on blocks of equal length.

    Args:
        weight_decay: on matrices only.
    """

    def __init__(self, weight_decay: float) -> None:
        super().__init__(weight_decay)
        self.val_perplexity = Perplexity()

    @abstractmethod
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean cross-entropy of predicting every token from those before it."""

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, samples = self.loss(batch), len(batch["input_ids"])
        self.val_perplexity.update(loss, weight=samples)
        self.log("val_loss", loss, batch_size=samples, prog_bar=True, sync_dist=True)
        self.log("val_perplexity", self.val_perplexity, batch_size=samples)
