"""Lightning's finetuning callbacks compare parameters by value; each rank has the values of its own stages alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.patches import replaced


def known_by_identity() -> AbstractContextManager[None]:
    """Let ``BaseFinetuning`` add all parameters to an optimizer that are not in it.

    On one device Lightning (2.6) also leaves out those that are equal to one in the optimizer (``torch.equal``).
    """

    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in known]

    return replaced(BaseFinetuning, "filter_on_optimizer", staticmethod(filter_on_optimizer), gated=False)
