"""Models whose parameters are frozen, or used by several layers or outside of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.zoo.base import WIDTH, Regression, blocks


class FrozenPrefix(Regression):
    """Nothing below the third layer is trained: no gradient goes there."""

    depth = 5

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embed, *self.layers[:2]):
            module.requires_grad_(False)


class FrozenLayers(Regression):
    """Only the head and a norm in the middle are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        for module in (self.embed, self.layers):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            x = layer(self.norm(x) if i == 2 else x)
        return self.head(x)


class SharedNorm(Regression):
    """One norm runs after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.norm(x + layer(x))
        return self.head(x)


class SharedByLayers(Regression):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].linear.weight = self.layers[0].linear.weight


class TiedToLayers(Regression):
    """Modules before and behind the layers have the weights of layers of other stages."""

    def __init__(self) -> None:
        super().__init__([*blocks(3), nn.Linear(WIDTH, 1)])
        self.embed.weight = self.layers[2].linear.weight
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x) + self.head(x).mean(1, keepdim=True)


class SharedModule(Regression):
    """One activation with a parameter occurs between all layers of a Sequential."""

    def __init__(self) -> None:
        activation = nn.PReLU()
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        super().__init__([])
        self.layers = nn.Sequential(*(layer for linear in linears for layer in (linear, activation)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class ScaleInTwoStages(Regression):
    """A learned scale is used before the first layer and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x / self.scale)
