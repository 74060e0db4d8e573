"""Models whose layers are no plain functions: lookups, hooks, states, statistics, random numbers, lengths."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.base import WIDTH, Block, Module, Regression


class Lookups(Module):
    """Integer tensors go from layer to layer; an embedding between the layers looks them up."""

    class Layer(Block):
        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), (3 * ids + 1) % 20

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = self.embed(ids)
        for layer in self.layers:
            x, ids = layer(x, ids)
            x = x + self.embed(ids)
        return F.cross_entropy((x @ self.embed.weight.mT).mT, ids)


class WeightNorm(Regression):
    """Weights that are computed from parameters before each use, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.utils.parametrizations.weight_norm(layer.linear)
        nn.utils.parametrizations.weight_norm(self.embed)
        nn.utils.weight_norm(self.head)


class Recurrent(Module):
    """LSTMs as layers: their results are nested tuples, and they refer to their weights weakly."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return self.lstm(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 20)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, total = self.embed(batch["ids"]), 0.0
        for layer in self.layers:
            x, (hidden, cell) = layer(x)
            total = total + hidden.square().mean() + cell.square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["ids"].flatten()) + total


class Statistics(Regression):
    """Batch norm in the layers: its running statistics see every micro-batch once, in order."""

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x))


class Noise(Regression):
    """Random noise is drawn in the step, before, between and after the layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x + 0.1 * torch.randn_like(x))
        for layer in self.layers:
            x = layer(x * (1 + 0.1 * torch.rand(len(x), 1, dtype=x.dtype)))
        return self.head(x) + 0.1 * torch.randn(len(x), 1, dtype=x.dtype)


class Sequences(Module):
    """Embeds integers, mixes over a dimension whose length differs from batch to batch."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            attention = torch.softmax(x @ self.linear(x).mT, -1)
            return self.norm(x + attention @ x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["ids"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x.mean(1) @ self.embed.weight.mT, batch["ids"][:, 0])
