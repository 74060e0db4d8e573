"""A small net with a loss, its batches, and the pipelines that its steps are run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.zoo import base

WIDTH = 6


class Block(base.Block):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)


class Net(nn.Module):
    """Four blocks with an embedding before and a head behind them; subclasses change ``body``."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.head(self.body(self.embed(x), x)), y)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h


def batch(samples: int = 7, width: int = WIDTH) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, width), "y": torch.randn(samples, 1)}


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    return [batch() for _ in range(count)]


RUNS = [
    {"ranks": 2},
    {"ranks": 4, "schedule": "gpipe"},
    {"ranks": 2, "schedule": "interleaved"},
    {"ranks": 1, "stages": 4},
]


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.linear(torch.sin(x))  # type: ignore[no-any-return]


class FilledThroughViews(Net):
    """The same through views of it, and what is filled is needed after the layers."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        tokens, more = torch.zeros(len(x), WIDTH), torch.ones(len(x), WIDTH)
        tokens[:, :3].copy_(h[:, :3])
        tokens.view(-1)[3:WIDTH] = h[0, 3:]
        for row in range(len(x)):
            more[row].mul_(h.mean(0))
        return super().body(h, x) * tokens + more


class Carried(Net):
    """The input of the first layer is needed after the last one, and a list of all states between them."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        states = [h]
        for layer in self.layers:
            states.append(layer(sum(states) / len(states)))
        return torch.stack(states).mean(0) + h * x


class Scaled(Net):
    """One parameter used before, between and after the layers, and a norm shared by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.norm = nn.LayerNorm(WIDTH)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = h * self.scale[4]
        for number, layer in enumerate(self.layers):
            h = h + self.scale[number] * layer(self.norm(h))
        return self.norm(h) * self.scale[4]


class ViewsAndChunks(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        left, right = h.chunk(2, dim=1)
        flat = h.view(-1)
        for layer in self.layers:
            h = layer(torch.cat([left, right], 1) + flat.view_as(h) + h)
        return h * left.sum() + flat.view_as(h)
