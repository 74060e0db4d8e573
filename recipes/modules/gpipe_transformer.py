"""GPipe's Transformer as a language model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.models import GPipeTransformer
from recipes.modules.language import LanguageModel


class TransformerLM(LanguageModel, network=GPipeTransformer):
    """Transformer-L of GPipe's Table 1.

    Args:
        positions: tokens of the longest block; they have no parameters.
        weight_decay: on matrices only.
        network: arguments of `recipes.models.GPipeTransformer`.
    """

    def __init__(self, *, positions: int = 1024, weight_decay: float = 0.0, **network: Any) -> None:
        super().__init__(weight_decay)
        self.save_hyperparameters()
        self.model = GPipeTransformer(**network)
        self.example_input_array = torch.zeros(1, positions, dtype=torch.long)

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
