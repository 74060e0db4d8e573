"""How a module gets its optimizer, and RMSProp as TensorFlow computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
MakeScheduler = Callable[[Optimizer, int], LRScheduler]


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with weight decay on matrices only: not on biases, norms and other vectors."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


class RMSPropTF(Optimizer):
    """RMSProp with epsilon under the root, squares that start at one, and a momentum that contains the learning rate.

    With TensorFlow's epsilon of 1.0 these three matter: `torch.optim.RMSprop` takes far larger steps. ::

        squares  <- decay squares + (1 - decay) gradient^2
        momentum <- beta momentum + lr gradient / sqrt(squares + eps)
        weight   <- weight - momentum

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        decay: of the squares.
        momentum: the beta.
        eps: added to the squares.
        weight_decay: L2 penalty, added to the gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = RMSPropTF([weight], lr=1.0, decay=0.9, momentum=0.0, eps=1.0)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> round(weight.item(), 4), round(-(0.9 * 1 + 0.1 * 1 + 1.0) ** -0.5, 4)
        (-0.7071, -0.7071)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.015,
        decay: float = 0.9,
        momentum: float = 0.9,
        eps: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["squares"] = torch.ones_like(weight)
            state["momentum"] = torch.zeros_like(weight)
        squares, momentum = state["squares"], state["momentum"]
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        squares.mul_(group["decay"]).addcmul_(gradient, gradient, value=1 - group["decay"])
        momentum.mul_(group["momentum"]).addcdiv_(gradient, (squares + group["eps"]).sqrt_(), value=group["lr"])
        weight.sub_(momentum)
