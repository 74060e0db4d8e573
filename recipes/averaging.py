"""The moving average of weights that AmoebaNet is validated with."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


class MovingAverage(WeightAveraging):
    """An exponential moving average of weights and batch-norm statistics, for validation and as the final weights.

    The average begins short, as TensorFlow's does: over the first steps its decay is (1 + steps) / (10 + steps).

    Args:
        decay: share of the average that a step keeps.
    """

    def __init__(self, decay: float = 0.9999) -> None:
        def average(old: Tensor, new: Tensor, steps: Tensor | int) -> Tensor:
            if not new.is_floating_point():
                return new
            # as a tensor: on ranks that do not have this parameter there is no number to be had
            count = torch.as_tensor(steps, dtype=old.dtype, device=old.device)
            kept = ((1 + count) / (10 + count)).clamp(max=decay)
            return torch.lerp(new.to(old.dtype), old, kept)

        super().__init__(use_buffers=True, avg_fn=average)
