"""GPT-2 as a LightningModule: Hugging Face's model, built from its configuration."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

from recipes.models import gpt2
from recipes.modules.trained import Trained, check_length
from recipes.optim import MakeOptimizer, MakeScheduler


class Perplexity(MeanMetric):
    """The exponential of the mean loss over everything seen: e to the cross-entropy per token."""

    @override
    def compute(self) -> Tensor:
        return super().compute().exp()


class GPT2(Trained):
    """GPT-2 as a language model.

    Args:
        vocabulary: number of tokens.
        positions: longest block.
        width: hidden size.
        layers: number of Transformer blocks.
        heads: attention heads.
        dropout: probability of every dropout.
        tied: the output matrix is that of the embeddings; Chimera's has one of its own.
        weight_decay: on matrices only.
        optimizer: makes the optimizer from parameter groups; needed for training only.
        scheduler: makes the learning rate schedule from the optimizer and the number of steps; None keeps it constant.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 50257,
        positions: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
        tied: bool = True,
        weight_decay: float = 0.01,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
    ) -> None:
        super().__init__(weight_decay, optimizer, scheduler)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.positions = positions
        self.model = gpt2(
            vocabulary=vocabulary,
            positions=positions,
            width=width,
            layers=layers,
            heads=heads,
            dropout=dropout,
            tied=tied,
        )
        self.val_perplexity = Perplexity()

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        check_length(batch["input_ids"], self.positions)
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        check_length(batch["input_ids"], self.positions)
        loss, samples = self.model(**batch).loss, len(batch["input_ids"])
        self.val_perplexity.update(loss, weight=samples)
        self.log("val_loss", loss, batch_size=samples, prog_bar=True, sync_dist=True)
        self.log("val_perplexity", self.val_perplexity, batch_size=samples)
