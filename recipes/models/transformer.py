"""The parts that GPipe's two Transformers share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class Attention(nn.Module):
    """Multi-head attention.

    Args:
        width: of the states.
        heads: number of heads.
        head_size: width of a head; ``width / heads`` by default.
        dropout: on the attention weights.
    """

    def __init__(self, width: int, heads: int, head_size: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size = width // heads if head_size is None else head_size
        self.dropout = dropout
        inner = heads * self.head_size
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.output = nn.Linear(inner, width)

    @override
    def forward(self, states: Tensor, memory: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Lets every state look at the memory.

        Args:
            states: shape [batch, length, width].
            memory: shape [batch, memory length, width]; the states themselves for self-attention.
            mask: shape [batch, memory length], true where the memory may be looked at; None allows all of it.
            causal: a state may not look at later ones.

        Returns:
            shape [batch, length, width].
        """
        query, key, value = (
            self._heads(self.query(states)),
            self._heads(self.key(memory)),
            self._heads(self.value(memory)),
        )
        allowed = None if mask is None else mask[:, None, None, :]
        mixed = F.scaled_dot_product_attention(
            query, key, value, allowed, dropout_p=self.dropout if self.training else 0.0, is_causal=causal
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Sequential):
    """Two linear layers with a ReLU between them.

    Args:
        width: of the states.
        inner: between the layers.
        dropout: after either layer.
    """

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__(
            nn.Linear(width, inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner, width), nn.Dropout(dropout)
        )


class Block(nn.Module):
    """Self-attention and a feed-forward layer, either with its norm before it and a residual around it.

    Args:
        width: of the states.
        inner: of the feed-forward layer.
        heads: attention heads.
        head_size: width of a head; ``width / heads`` by default.
        dropout: probability of every dropout.
        causal: a state may not look at later ones.
    """

    def __init__(
        self, width: int, inner: int, heads: int, head_size: int | None, dropout: float, *, causal: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_size, dropout)
        self.dropout, self.causal = nn.Dropout(dropout), causal
        self.feed_forward = FeedForward(width, inner, dropout)

    @override
    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = self.attention_norm(states)
        states = states + self.dropout(self.attention(seen, seen, mask, self.causal))
        result: Tensor = states + self.feed_forward(self.feed_forward_norm(states))
        return result


def positions(length: int, width: int, like: Tensor) -> Tensor:
    """Sines and cosines of every position, at wavelengths from 2 pi to 10,000 times that; no parameters.

    Args:
        length: number of positions.
        width: of the states, even.
        like: a tensor of the wanted device and type.

    Returns:
        shape [length, width].
    """
    steps = torch.arange(width // 2, device=like.device, dtype=torch.float32)
    frequencies = torch.exp(steps * (-math.log(10_000.0) / max(1, width // 2 - 1)))
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)
