"""GPT-2 as a LightningModule: Hugging Face's model, built from its configuration."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from recipes.models import gpt2
from recipes.modules.language import LanguageModel


class GPT2(LanguageModel, network=gpt2):
    """GPT-2 as a language model.

    Args:
        weight_decay: on matrices only.
        network: arguments of `recipes.models.gpt2`.
    """

    def __init__(self, *, weight_decay: float = 0.01, **network: Any) -> None:
        super().__init__(weight_decay)
        self.save_hyperparameters()
        self.model = gpt2(**network)

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss
