"""The Transformer language model of GPipe's Table 1, which grows to 83.9 billion parameters."""

from __future__ import annotations

import math

from torch import Tensor, nn
from typing_extensions import override

from recipes.models.transformer import Block, positions


class GPipeTransformer(nn.Module):
    """A Transformer language model with an output matrix of its own and positions without parameters.

    Args:
        layers: number of blocks: the L of Transformer-L, 3, 13, 103, 415 or 1663 in the table.
        vocabulary: number of tokens.
        width: of the states.
        inner: of the feed-forward layers.
        heads: attention heads.
        dropout: probability of every dropout.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = GPipeTransformer(13)
        >>> sum(parameter.numel() for parameter in model.parameters())
        785765632
    """

    def __init__(
        self,
        layers: int,
        *,
        vocabulary: int = 32_000,
        width: int = 2048,
        inner: int = 8192,
        heads: int = 32,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, inner, heads, None, dropout, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts every next token.

        Args:
            tokens: shape [batch, length].

        Returns:
            logits of shape [batch, length, vocabulary].
        """
        states = self.embedding(tokens) * math.sqrt(self.width)
        states = self.dropout(states + positions(tokens.shape[1], self.width, like=states))
        for layer in self.layers:
            states = layer(states)
        logits: Tensor = self.output(self.norm(states))
        return logits
