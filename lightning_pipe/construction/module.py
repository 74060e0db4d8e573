"""Deferred tensors of a module: found, and given their memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pipe.construction.deferred import ASSIGNMENTS, Deferred, real_like
from lightning_pipe.construction.unset import is_unset


def deferred_tensors(module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[Deferred]:
    """The deferred tensors of a module, each once: parameters, buffers, and those in attributes and containers.

    Args:
        module: the module.
        without: parts of it that are left out.
    """
    left_out = {part for layer in without for part in layer.modules()}
    seen: set[int] = set()
    for part in module.modules():
        if part in left_out:
            continue
        waiting: list[Any] = list(vars(part).values())
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, nn.Module):
                continue
            if isinstance(value, Deferred):
                seen.add(id(value))
                yield value
            elif isinstance(value, dict):
                seen.add(id(value))
                waiting += value.values()
            elif isinstance(value, list | tuple | set):
                seen.add(id(value))
                waiting += value


def materialize(module: nn.Module, without: Iterable[nn.Module] = ()) -> None:
    """Turn deferred tensors into ordinary ones, in place: everybody who refers to one has the ordinary one afterwards.

    Those stay that were on the meta device and have no values yet.

    Args:
        module: the module.
        without: parts of it whose tensors stay as they are, unless others have them too.

    Example:
        >>> from lightning_pipe.construction import deferred_init
        >>> with deferred_init():
        ...     layer = torch.nn.Linear(1000, 1000)
        >>> materialize(layer)
        >>> type(layer.weight).__name__
        'Parameter'
    """
    waiting = [tensor for tensor in deferred_tensors(module, without) if not is_unset(tensor)]
    with without_weak_references(module):
        for tensor in waiting:  # one after the other: what one is computed from is gone before the next
            torch.utils.swap_tensors(tensor, real_like(tensor))  # type: ignore[no-untyped-call]
    ASSIGNMENTS.settle()


@contextmanager
def without_weak_references(module: nn.Module) -> Iterator[None]:
    """Recurrent layers refer to their weights weakly, and such tensors cannot be swapped (torch 2.13)."""
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    # what somebody else has dropped for good, as a division over ranks does, stays dropped
    referred = [[reference is not None for reference in layer._flat_weight_refs] for layer in layers]
    for layer in layers:
        layer._flat_weight_refs = [None] * len(layer._flat_weight_refs)
    try:
        yield
    finally:
        for layer, before in zip(layers, referred, strict=True):
            pairs = zip(layer._flat_weights_names, before, strict=True)
            layer._flat_weight_refs = [weakref.ref(getattr(layer, name)) if had else None for name, had in pairs]
