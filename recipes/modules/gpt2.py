"""GPT-2 as a LightningModule: Hugging Face's model, built from its configuration."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from recipes.models import gpt2
from recipes.modules.language import LanguageModel
from recipes.optim import MakeOptimizer, MakeScheduler


class GPT2(LanguageModel, network=gpt2):
    """GPT-2 as a language model.

    Args:
        weight_decay: on matrices only.
        optimizer: makes the optimizer from parameter groups; needed for training only.
        scheduler: makes the learning rate schedule from the optimizer and the number of steps; None keeps it constant.
        network: arguments of `recipes.models.gpt2`.
    """

    def __init__(
        self,
        *,
        weight_decay: float = 0.01,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
        **network: Any,
    ) -> None:
        super().__init__(weight_decay, optimizer, scheduler)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.model = gpt2(**network)
        self.positions = self.model.config.n_positions

    @override
    def logits(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=tokens).logits
        return output

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss
