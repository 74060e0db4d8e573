"""What the models of the zoo have in common, and the plain ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
BATCH = 8


class Module(L.LightningModule):
    """What the models have in common; each one writes `loss`, as a mean over the samples."""

    learning_rate = 0.1

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_plus_one", loss.detach() + 1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


class Block(nn.Module):
    """A plain layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Regression(Module):
    """Maps ``x`` to ``y``; the models below differ in `forward`, or in their layers.

    Args:
        layers: others than ``depth`` times ``Layer``.
    """

    Layer: type[nn.Module] = Block
    depth = 4

    def __init__(self, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        layers = [self.Layer() for _ in range(self.depth)] if layers is None else layers
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 1)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def blocks(number: int = 4) -> list[nn.Module]:
    return [Block() for _ in range(number)]


class Mlp(Module):
    """An nn.Sequential with another one inside; a batch is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        inner = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sequential(*inner), nn.Linear(WIDTH, 1))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)


class Residual(Regression):
    """Residuals, norms and learned scales between the layer calls."""

    depth = 5

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.layers)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, len(self.layers)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, norm, scale in zip(self.layers, self.norms, self.scales, strict=True):
            x = x + scale * layer(norm(x))
        return self.head(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class HiddenStates(Regression):
    """Every layer reads the sum of all earlier hidden states, the head their mean."""

    depth = 5

    def forward(self, x: Tensor) -> Tensor:
        states = [self.embed(x)]
        for layer in self.layers:
            states.append(layer(sum(states)))
        return self.head(torch.stack(states).mean(0))
