"""GPipe's Transformer as a language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.models import GPipeTransformer
from recipes.modules.language import LanguageModel
from recipes.optim import MakeOptimizer, MakeScheduler


class TransformerLM(LanguageModel):
    """Transformer-L of GPipe's Table 1.

    Args:
        layers: number of blocks: the L.
        vocabulary: number of tokens.
        positions: longest block; positions have no parameters, so this is a limit only.
        width: of the states.
        inner: of the feed-forward layers.
        heads: attention heads.
        dropout: probability of every dropout.
        weight_decay: on matrices only.
        optimizer: makes the optimizer from parameter groups; needed for training only.
        scheduler: makes the learning rate schedule from the optimizer and the number of steps; None keeps it constant.
    """

    def __init__(
        self,
        *,
        layers: int = 3,
        vocabulary: int = 32_000,
        positions: int = 1024,
        width: int = 2048,
        inner: int = 8192,
        heads: int = 32,
        dropout: float = 0.1,
        weight_decay: float = 0.0,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
    ) -> None:
        super().__init__(positions, weight_decay, optimizer, scheduler)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.model = GPipeTransformer(
            layers, vocabulary=vocabulary, width=width, inner=inner, heads=heads, dropout=dropout
        )

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
