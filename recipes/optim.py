"""Learning rate schedules, as factories that Hydra completes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
MakeScheduler = Callable[[Optimizer, int], LRScheduler]


def warmup_cosine(optimizer: Optimizer, steps: int, warmup: float = 0.1, floor: float = 0.1) -> LambdaLR:
    """Linear warm-up, then half a cosine down to ``floor`` times the learning rate.

    Args:
        optimizer: whose learning rate to change.
        steps: optimizer steps in the whole training.
        warmup: share of the steps spent on the warm-up.
        floor: last learning rate / highest learning rate.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = warmup_cosine(optimizer, steps=10, warmup=0.2, floor=0.0)
        >>> rates = [round(schedule.lr_lambdas[0](step), 2) for step in range(10)]
        >>> rates[:3], rates[-1]
        ([0.5, 1.0, 0.96], 0.0)
    """
    rising = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = min(1.0, (step + 1 - rising) / max(1, steps - rising))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with weight decay on matrices only: not on biases, norms and other vectors."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
