"""The entry of received tensors into autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.pipeline.cut.changes import counted


class Inbox:
    """Tensors received at a cut, and, after the backward pass, their gradients.

    The user's code gets tensors that are not leaves, so that changing them in place works as it does on one device.

    Args:
        tensors: the received values in the order of the cut's entries.
        requires_grad: which of them need a gradient.

    Attributes:
        anchor: the leaf behind the entry; a backward pass "towards" it runs what leads to the received tensors.
        gradients: those of the tensors that need one, after the backward pass.
    """

    def __init__(self, tensors: Sequence[Tensor], requires_grad: Sequence[bool]) -> None:
        self.requires_grad = tuple(requires_grad)
        self.gradients: tuple[Tensor | None, ...] = (None,) * sum(self.requires_grad)
        wanted = [tensor for tensor, needed in zip(tensors, requires_grad, strict=True) if needed]
        with torch.enable_grad():
            self.anchor = torch.zeros((), requires_grad=True)
            entered = iter(_Enter.apply(self.anchor, self, *wanted) if wanted else ())  # type: ignore[no-untyped-call]
        self.tensors = [
            next(entered) if needed else counted(tensor) for tensor, needed in zip(tensors, requires_grad, strict=True)
        ]


class _Enter(torch.autograd.Function):
    """Returns tensors as results of an operation whose backward pass delivers their gradients to the inbox."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inbox: Inbox, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inbox = inbox
        ctx.set_materialize_grads(False)
        # Not the arguments themselves: autograd would return views of them, which cannot be changed in place.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.inbox.gradients = gradients
        ctx.inbox = None
        return (None,) * (2 + len(gradients))


Entry: type[Any] = _Enter._backward_cls
"""The type of the nodes at which graphs end that begin with received tensors."""
