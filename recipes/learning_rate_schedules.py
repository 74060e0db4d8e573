"""Learning rate schedules, as factories that Hydra completes."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


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
    return _by_share(optimizer, steps, warmup, lambda done: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def warmup_linear(optimizer: Optimizer, steps: int, warmup: float = 0.1) -> LambdaLR:
    """Linear warm-up, then linearly down to nothing: BERT's.

    Args:
        optimizer: whose learning rate to change.
        steps: optimizer steps in the whole training.
        warmup: share of the steps spent on the warm-up.

    Example:
        >>> import torch
        >>> schedule = warmup_linear(torch.optim.SGD([torch.zeros(1)], lr=1.0), steps=10, warmup=0.2)
        >>> [round(schedule.lr_lambdas[0](step), 2) for step in range(10)]
        [0.5, 1.0, 0.88, 0.75, 0.62, 0.5, 0.38, 0.25, 0.12, 0.0]
    """
    return _by_share(optimizer, steps, warmup, lambda done: 1 - done)


def warmup_exponential(
    optimizer: Optimizer,
    steps: int,
    epochs: float = 100.0,
    warmup: float = 3.0,
    every: float = 2.4,
    rate: float = 0.97,
    floor: float = 1e-4,
) -> LambdaLR:
    """Linear warm-up, and steps down at equal distances: AmoebaNet's.

    Args:
        optimizer: whose learning rate to change.
        steps: optimizer steps in the whole training.
        epochs: epochs in the whole training.
        warmup: epochs of the warm-up.
        every: epochs between two steps down.
        rate: factor of a step down.
        floor: smallest learning rate / highest learning rate.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = warmup_exponential(optimizer, steps=80, epochs=8, warmup=1, every=2, rate=0.5, floor=0.2)
        >>> [round(schedule.lr_lambdas[0](step), 2) for step in range(5, 80, 10)]
        [0.6, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]
    """
    return _by_epoch(optimizer, steps / epochs, warmup, lambda epoch: max(floor, rate ** (epoch // every)))


def warmup_milestones(
    optimizer: Optimizer,
    steps: int,
    epochs: float = 90.0,
    warmup: float = 4.0,
    milestones: tuple[float, ...] = (30.0, 60.0, 80.0),
    rate: float = 0.1,
) -> LambdaLR:
    """Linear warm-up, and steps down at given epochs: ResNet's.

    Args:
        optimizer: whose learning rate to change.
        steps: optimizer steps in the whole training.
        epochs: epochs in the whole training.
        warmup: epochs of the warm-up.
        milestones: epochs after which the learning rate goes down.
        rate: factor of a step down.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = warmup_milestones(optimizer, steps=90, warmup=4)
        >>> [round(schedule.lr_lambdas[0](step), 3) for step in (0, 1, 3, 29, 30, 60, 80)]
        [0.25, 0.5, 1.0, 1.0, 0.1, 0.01, 0.001]
    """

    def falling(epoch: float) -> float:
        return rate ** sum(epoch >= milestone for milestone in milestones)

    return _by_epoch(optimizer, steps / epochs, warmup, falling)


def inverse_square_root(optimizer: Optimizer, steps: int, warmup: int = 4000) -> LambdaLR:
    """Linear warm-up, then down with the root of the number of steps: the Transformer's.

    Args:
        optimizer: whose learning rate to change; its own is the highest one.
        steps: optimizer steps in the whole training; the warm-up takes at most a quarter of them.
        warmup: steps of the warm-up.

    Example:
        >>> import torch
        >>> schedule = inverse_square_root(torch.optim.SGD([torch.zeros(1)], lr=1.0), steps=100, warmup=4)
        >>> [round(schedule.lr_lambdas[0](step), 2) for step in (0, 1, 3, 15, 63)]
        [0.25, 0.5, 1.0, 0.5, 0.25]
    """
    rising = max(1, min(warmup, steps // 4))
    return LambdaLR(optimizer, lambda step: min((step + 1) / rising, (rising / (step + 1)) ** 0.5))


def _by_share(optimizer: Optimizer, steps: int, warmup: float, falling: Callable[[float], float]) -> LambdaLR:
    """Linear warm-up over a share of the steps, then ``falling`` from 0 to 1 over the others."""
    rising = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        after = (step + 1 - rising) / max(1, steps - rising)
        return (step + 1) / rising if step < rising else falling(min(1.0, after))

    return LambdaLR(optimizer, factor)


def _by_epoch(optimizer: Optimizer, per_epoch: float, warmup: float, falling: Callable[[float], float]) -> LambdaLR:
    """Linear warm-up over epochs of ``per_epoch`` steps, at most as high as ``falling``, which it then follows."""

    def factor(step: int) -> float:
        epoch = step / per_epoch
        return min(falling(epoch), (step + 1) / (warmup * per_epoch)) if epoch < warmup else falling(epoch)

    return LambdaLR(optimizer, factor)
