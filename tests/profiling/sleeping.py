"""Layers that sleep, and a batch for them, for processes that measure: they import torch and nothing else."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds * len(gradients[0]))
        return gradients[0], None


class Sleeper(nn.Module):
    """Sleeps for each sample, twice as long backward."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x * self.scale, self.seconds)
        return out


def sleepers(seconds: float = 0.01) -> nn.Sequential:
    """The second of three layers is twice as slow; also what the command line makes."""
    return nn.Sequential(Sleeper(seconds), Sleeper(2 * seconds), Sleeper(seconds))


def batch() -> Tensor:
    return torch.ones(4, 8)


def broken() -> nn.Sequential:
    """Takes no batch of that width."""
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())
