"""The tensors of a module: found, and given their memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_pipe.construction.deferred import ASSIGNMENTS, Deferred, real_like, view_of
from lightning_pipe.construction.unset import is_unset


def tensors_of(*roots: object) -> Iterator[Tensor]:
    """The tensors that attributes and containers of some objects lead to; torch's and Lightning's own are no way."""
    seen: set[int] = set()
    nodes = [node for root in roots for node in vars(root).values()]
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Tensor):
            yield node
        elif isinstance(node, Mapping):
            nodes.extend(node.values())
        elif isinstance(node, list | tuple | set | deque):
            nodes.extend(node)
        elif isinstance(node, nn.Module) or (hasattr(node, "__dict__") and not _is_frameworks(type(node))):
            nodes.extend(vars(node).values())


def _is_frameworks(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in ("torch", "lightning", "pytorch_lightning", "builtins")


def materialize(module: nn.Module) -> None:
    """Turn deferred tensors into ordinary ones, in place: everybody who refers to one has the ordinary one afterwards.

    Those stay that were on the meta device and have no values yet.

    Example:
        >>> from lightning_pipe.construction import deferred_init
        >>> with deferred_init():
        ...     layer = torch.nn.Linear(1000, 1000)
        >>> materialize(layer)
        >>> type(layer.weight).__name__
        'Parameter'
    """
    # attributes of modules may be large: without recorded tensors nobody looks at them
    tensors = tensors_of(module) if ASSIGNMENTS.alive else ()
    waiting = [tensor for tensor in tensors if isinstance(tensor, Deferred) and not is_unset(tensor)]
    with without_weak_references(module):
        for tensor in waiting:  # one after the other: what one is computed from is gone before the next
            cell = view_of(tensor).cell
            torch.utils.swap_tensors(tensor, real_like(tensor))  # type: ignore[no-untyped-call]
            if not cell.users:  # cells and operations refer to each other, and stay until Python collects them
                cell.memory = None
    ASSIGNMENTS.settle()


@contextmanager
def without_weak_references(module: nn.Module) -> Iterator[None]:
    """Recurrent layers refer to their weights weakly, and such tensors cannot be swapped (torch 2.13)."""
    # what somebody else has dropped for good, as a division over ranks does, stays dropped
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase) and any(part._flat_weight_refs)]
    for layer in layers:
        layer._flat_weight_refs = [None] * len(layer._flat_weight_refs)
    try:
        yield
    finally:
        for layer in layers:
            layer._flat_weight_refs = [weakref.ref(getattr(layer, name)) for name in layer._flat_weights_names]
