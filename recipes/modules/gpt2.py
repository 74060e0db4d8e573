"""GPT-2 as a LightningModule: Hugging Face's model, built from its configuration."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from recipes.models import gpt2
from recipes.modules.language import LanguageModel
from recipes.optim import MakeOptimizer, MakeScheduler


class GPT2(LanguageModel):
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
        super().__init__(positions, weight_decay, optimizer, scheduler)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.model = gpt2(
            vocabulary=vocabulary,
            positions=positions,
            width=width,
            layers=layers,
            heads=heads,
            dropout=dropout,
            tied=tied,
        )

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss
