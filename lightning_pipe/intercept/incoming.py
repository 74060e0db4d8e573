"""The entry of received tensors into autograd, and the way through its graphs that may lead there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LiveTensor


class Incoming:
    """Tensors received at a cut, and, after the backward pass, their gradients.

    The user's code gets tensors that are not leaves, so that changing them in place works as it does on one device.

    Args:
        entries: those of the cut of which values have come.
        values: the received values by number.
        skips: whether skip connections have begun on earlier stages.

    Attributes:
        numbers: of the tensors that need a gradient.
        anchor: the leaf behind the entry; a backward pass "towards" it runs what leads to the received tensors.
        gradients: theirs, after the backward pass.
        hooked: whether there is a backward hook on one of the tensors.
    """

    def __init__(self, entries: Sequence[LiveTensor], values: Mapping[int, Tensor], *, skips: bool) -> None:
        self.numbers = tuple([entry.number for entry in entries if entry.requires_grad])
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(self.numbers)
        self.hooked, self._skips = False, skips
        wanted = [values[number] for number in self.numbers]
        with torch.enable_grad():
            self.anchor = torch.zeros((), requires_grad=True)
            entered = iter(_Enter.apply(self.anchor, self, *wanted) if wanted else ())  # type: ignore[no-untyped-call]
        self.tensors = [next(entered) if each.requires_grad else values[each.number].detach() for each in entries]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """What a backward pass has brought: one for all, or several if the user's own backward starts others."""
        pairs = zip(self.gradients, gradients, strict=True)
        self.gradients = tuple([new if old is None else old if new is None else old + new for old, new in pairs])

    def check_hooks(self) -> None:
        """Raise if a hook on a tensor may have got a part of its gradient, after the backward pass.

        If one tensor alone has got a gradient, earlier stages compute nothing else from it that counts.
        """
        if self.hooked and (self._skips or sum(gradient is not None for gradient in self.gradients) > 1):
            raise CutError(
                "a backward hook is registered on a tensor that an earlier stage computes, and other tensors come from "
                "there too: the hook gets a part of the gradient.",
                hint="Register it where the tensor is made, before the next layer is called, or on a tensor made from "
                "it: x = x * 1.0.",
            )


class _Enter(torch.autograd.Function):
    """Returns tensors as results of an operation whose backward pass delivers their gradients to the `Incoming`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, incoming: Incoming, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.incoming = incoming
        ctx.set_materialize_grads(False)
        # Not the arguments themselves: autograd would return views of them, which cannot be changed in place.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.incoming.add(gradients)
        return (None,) * (2 + len(gradients))


Entry: type[Any] = _Enter._backward_cls
"""The type of the nodes at which graphs end that begin with received tensors."""


def _noted(name: str) -> Any:
    original = getattr(Entry, name)

    def register(node: Any, hook: Any) -> Any:
        node.incoming.hooked = True
        return original(node, hook)

    return register


for _name in ("register_hook", "register_prehook", "_register_hook_dict"):
    setattr(Entry, _name, _noted(_name))


Edge = tuple[Any, int]
"""A node and the number of one of its results; the node is ``None`` for what has no graph."""


def edge_of(tensor: Tensor | GradientEdge) -> Edge:
    """Where the graph behind a tensor begins."""
    return tensor[:2] if isinstance(tensor, GradientEdge) else (tensor.grad_fn, tensor.output_nr)


def nodes_behind(tensors: Iterable[Tensor | GradientEdge], without: Edge = (None, 0)) -> Iterator[Any]:
    """The nodes of the graph behind some tensors, other than those to which ``without`` alone leads."""
    seen: set[Any] = set()
    pending = [edge_of(tensor) for tensor in tensors]
    while pending:
        edge = pending.pop()
        node = edge[0]
        if node is not None and node not in seen and edge != without:
            seen.add(node)
            yield node
            pending += node.next_functions
