"""Gradients of a schedule, withheld until Lightning calls ``loss.backward()``.

Lightning zeroes gradients between ``training_step`` and ``backward``, and the whole schedule runs in ``training_step``.
So the gradients of the schedule are withheld, and an autograd function with the parameters as inputs returns them::

    training_step                       zero_grad        loss.backward()
      parameter.grad -> set aside         parameter.grad   _ReturnedGradients.backward
      the schedule fills parameter.grad   = None             returns the gradients, scaled
      parameter.grad -> WithheldGradients                    autograd adds them to parameter.grad, with all hooks
      parameter.grad = what was set aside
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.local_parts import local, settled
from lightning_pipe.torch_internals import foreach_mul_


@dataclass
class WithheldGradients:
    """The fresh gradients of one batch, on their way from the schedule to ``loss.backward()``.

    Args:
        scale: the factor that the schedule has put on all losses.
    """

    scale: float = 1.0
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def loss(self, value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The loss of the batch: its backward pass gives every parameter its gradient.

        The gradients are multiplied in place by what comes from behind the loss (accumulation, gradient scaler) and
        become ``parameter.grad`` without a copy.
        """
        # the anchor keeps backward legal on a rank without trainable parameters
        anchor = torch.zeros((), requires_grad=True)
        if isinstance(value, Tensor):
            loss = value.to(device, dtype)
        else:
            loss = torch.full((), value, dtype=dtype, device=device)  # the host does not wait for it, as for a copy
        result: Tensor = _ReturnedGradients.apply(  # type: ignore[no-untyped-call]
            loss, self, anchor, *self.parameters
        )
        self.parameters = []
        return result


class _ReturnedGradients(torch.autograd.Function):
    """Returns the loss; its backward pass returns the withheld gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, withheld: WithheldGradients, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.withheld = withheld
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        withheld: WithheldGradients = ctx.withheld
        gradients, withheld.gradients, ctx.withheld = withheld.gradients, [], None
        factor = outputs[0] / withheld.scale
        # on an accelerator a look at the factor would wait for the device
        if gradients and (factor.device.type != "cpu" or factor.item() != 1.0):
            foreach_mul_([local(each) for each in gradients], factor)  # of several types, too
        return (None, None, None, *gradients)


@contextmanager
def withheld_gradients(parameters: Iterable[nn.Parameter], scale: float = 1.0) -> Iterator[WithheldGradients]:
    """Keep the gradients that the code inside computes apart from those that are there already.

    Inside, ``parameter.grad`` is ``None`` at first and the parameters' own hooks are silent: they run once, when
    autograd gets the gradients. Afterwards ``parameter.grad`` is what it was.

    Args:
        parameters: all that may get a gradient.
        scale: the factor that the code inside puts on its losses.
    """
    # those of other ranks get none, and to ask one costs as much as a small operation; the step may train frozen ones
    held = [each for each in parameters if not isinstance(each, AbsentTensor)]
    before = [parameter.grad for parameter in held]
    withheld = WithheldGradients(scale)
    # the dictionaries of tensor hooks and post-accumulate hooks are emptied in place: autograd has references to them
    both = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in held]
    silenced = [(hooks, dict(hooks)) for of_one in both for hooks in of_one if hooks]
    for parameter in held:
        parameter.grad = None
    for hooks, _ in silenced:
        hooks.clear()
    try:
        yield withheld
        withheld.parameters = [parameter for parameter in held if parameter.grad is not None]
        withheld.gradients = [settled(p.grad, p) for p in withheld.parameters if p.grad is not None]
    finally:
        for hooks, kept in silenced:
            hooks.update(kept)
        for parameter, gradient in zip(held, before, strict=True):
            parameter.grad = gradient
