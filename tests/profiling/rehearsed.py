"""What a profile measures on the fake device, whose kernels can be late."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lightning_pipe
from lightning_pipe.planning.cost_profile import CostProfile

SECONDS = 0.005


class Late(nn.Module):
    """The device needs some time for it, the host none."""

    def __init__(self, *own: nn.Module) -> None:
        super().__init__()
        self.own = nn.Sequential(*own)

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(int(SECONDS * 1e9))  # cycles of the fake device are nanoseconds
        return self.own(x) * 1


def profile_on(ranks: int) -> CostProfile:
    """Of a batch of the host."""
    net = nn.Sequential(*[Late(nn.Linear(8, 8)) for _ in range(3)])
    options = {"device": "cuda", "rounds": 1, "micro_batch_sizes": [2]}
    return lightning_pipe.profile(net, torch.randn(4, 8), ranks, **options)
