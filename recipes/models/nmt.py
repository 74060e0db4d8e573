"""GPipe's Transformer for multilingual machine translation, T(L, H, A)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.models.transformer import Attention, Block, FeedForward, positions

WIDTH, HEAD_SIZE = 1024, 64


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, and a feed-forward layer.

    Args:
        width: of the states.
        inner: of the feed-forward layer.
        heads: attention heads.
        head_size: width of a head.
        dropout: probability of every dropout.
    """

    def __init__(self, width: int, inner: int, heads: int, head_size: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.memory_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_size, dropout)
        self.memory_attention = Attention(width, heads, head_size, dropout)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = FeedForward(width, inner, dropout)

    @override
    def forward(self, states: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        seen = self.attention_norm(states)
        states = states + self.dropout(self.attention(seen, seen, causal=True))
        states = states + self.dropout(self.memory_attention(self.memory_norm(states), memory, mask))
        result: Tensor = states + self.feed_forward(self.feed_forward_norm(states))
        return result


class NMTTransformer(nn.Module):
    """An encoder-decoder for any pair of languages out of one vocabulary.

    ``layers`` holds the encoder's layers and, after them, the decoder's. What keeps deep ones stable in training
    (GPipe, section 5) is built in: feed-forward layers start smaller the more layers there are, and logits are clipped.

    Args:
        layers: of the encoder, and as many of the decoder: the L.
        inner: of the feed-forward layers: the H.
        heads: attention heads: the A.
        vocabulary: number of tokens.
        width: of the states.
        head_size: width of a head.
        dropout: probability of every dropout.
        logit_limit: logits are clipped to plus or minus this value while training; None leaves them alone. GPipe does
            not tell its value.
        shared_embeddings: one embedding for both languages; the output matrix is always one of its own.

    Example:
        >>> with torch.device("meta"):
        ...     sizes = [(6, 8192, 16), (24, 8192, 16), (12, 16384, 32), (32, 16384, 32), (64, 16384, 32)]
        ...     models = [NMTTransformer(*size) for size in sizes]
        >>> [f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.3f} G" for model in models]
        ['0.408 G', '1.239 G', '1.239 G', '3.086 G', '6.041 G']
    """

    def __init__(
        self,
        layers: int,
        inner: int,
        heads: int,
        *,
        vocabulary: int = 64_000,
        width: int = WIDTH,
        head_size: int = HEAD_SIZE,
        dropout: float = 0.1,
        logit_limit: float | None = None,
        shared_embeddings: bool = True,
    ) -> None:
        super().__init__()
        self.width, self.depth, self.logit_limit = width, layers, logit_limit
        self.embedding = nn.Embedding(vocabulary, width)
        self.target_embedding = self.embedding if shared_embeddings else nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        sizes = (width, inner, heads, head_size, dropout)
        self.layers = nn.ModuleList(
            [Block(*sizes) for _ in range(layers)] + [DecoderLayer(*sizes) for _ in range(layers)]
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draws the weights; feed-forward layers are divided by the number of layers (after Zhang et al., 2019)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.width**-0.5)
        for module in self.modules():
            if isinstance(module, FeedForward):
                for part in module:
                    if isinstance(part, nn.Linear):
                        part.weight /= self.depth

    @override
    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """Predicts every next token of the target.

        Args:
            source: tokens of shape [batch, source length].
            target: tokens of shape [batch, target length], beginning with the start token.
            mask: shape [batch, source length], true where the source is not padding.

        Returns:
            logits of shape [batch, target length, vocabulary].
        """
        states, memory = self._embed(self.embedding, source), None
        for index, layer in enumerate(self.layers):
            if index < self.depth:
                states = layer(states, mask)
                continue
            if memory is None:
                memory = self.encoder_norm(states)
                states = self._embed(self.target_embedding, target)
            states = layer(states, memory, mask)
        logits: Tensor = self.output(self.decoder_norm(states))
        if self.logit_limit is not None and self.training:
            logits = logits.clamp(-self.logit_limit, self.logit_limit)
        return logits

    def _embed(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        states = embedding(tokens) * math.sqrt(self.width)
        embedded: Tensor = self.dropout(states + positions(tokens.shape[1], self.width, like=states))
        return embedded
