"""Lightning's finetuning callback adds what the optimizer has not, whatever the values of other ranks are."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pipe.trainer.gradients import not_in_optimizer


def test_parameters_of_the_optimizer_are_left_out_and_others_of_equal_value_are_not() -> None:
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([one], lr=0.1)
    kept = not_in_optimizer(optimizer, [one, other])
    assert len(kept) == 1
    assert kept[0] is other
