"""The Transformer language model of GPipe's Table 1, which grows to 83.9 billion parameters."""

from __future__ import annotations

import math

from torch import Tensor, nn
from typing_extensions import override

from recipes.models.transformer import Attention, FeedForward, positions


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, either with its norm before it and a residual around it.

    Args:
        width: of the states.
        inner: of the feed-forward layer.
        heads: attention heads.
        dropout: probability of every dropout.
    """

    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = FeedForward(width, inner, dropout)

    @override
    def forward(self, states: Tensor) -> Tensor:
        seen = self.attention_norm(states)
        states = states + self.dropout(self.attention(seen, seen, causal=True))
        result: Tensor = states + self.feed_forward(self.feed_forward_norm(states))
        return result


class GPipeTransformer(nn.Module):
    """A Transformer language model with an output matrix of its own and positions without parameters.

    Args:
        layers: number of blocks.
        vocabulary: number of tokens.
        width: of the states.
        inner: of the feed-forward layers.
        heads: attention heads.
        dropout: probability of every dropout.
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
        self.layers = nn.ModuleList(Block(width, inner, heads, dropout) for _ in range(layers))
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


def gpipe_transformer(layers: int) -> GPipeTransformer:
    """Transformer-L of GPipe's Table 1.

    Args:
        layers: the L: 3, 13, 103, 415 or 1663 in the table.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = gpipe_transformer(13)
        >>> sum(parameter.numel() for parameter in model.parameters())
        785765632
    """
    return GPipeTransformer(layers)
