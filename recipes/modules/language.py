"""What the recipes' language models share: perplexity in validation."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

from recipes.data.vocabulary import Vocabulary
from recipes.modules.trained import Trained
from recipes.samples import Shown, indented

COMPLETED = 40  # tokens of a sample


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

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Predicts every next token.

        Args:
            tokens: shape [batch, length].

        Returns:
            shape [batch, length, vocabulary].
        """

    @override
    def predicted(self, batch: dict[str, Tensor]) -> Tensor:
        """Completes the first half of each block: the likeliest token, one after the other."""
        half = batch["input_ids"].shape[1] // 2
        tokens = batch["input_ids"][:, :half]
        for _ in range(min(half, COMPLETED)):
            tokens = torch.cat([tokens, self.logits(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens[:, half:]

    @override
    def shown(self, samples: dict[str, Tensor], words: Vocabulary | None) -> Shown:
        assert words is not None
        half, length = samples["input_ids"].shape[1] // 2, samples["predicted"].shape[1]
        parts = {
            "given": samples["input_ids"][:, :half],
            "completed": samples["predicted"],
            "was": samples["input_ids"][:, half : half + length],
        }
        texts = {name: [words.decode(row) for row in rows.tolist()] for name, rows in parts.items()}
        return ["\n".join(map(indented, texts, row)) for row in zip(*texts.values(), strict=True)]

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
