"""Notices that tensors change in place.

Autograd counts the changes, and knows what a view is a view of, but not for tensors that are made in inference mode
(torch 2.13), in which Lightning evaluates. So the tensors of a step are made outside it where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pipe.torch_internals import is_functorch_tensor


@contextmanager
def counting() -> Iterator[None]:
    """Tensors that are made inside count their changes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def counted(tensor: Tensor) -> Tensor:
    """The same values without a graph, as a tensor that counts its changes; the same memory where that has them."""
    if not tensor.is_inference():
        return tensor.detach()
    with counting():
        tensor = tensor.resolve_conj().resolve_neg()  # which the memory alone does not tell
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def memory_of(tensor: Tensor) -> int | None:
    """What is the same for tensors that share memory, while they live; ``None`` for those that have none."""
    if tensor.layout is not torch.strided or is_functorch_tensor(tensor):
        return None
    return int(tensor.untyped_storage()._cdata)


TensorState = int | Tensor | None
"""What tells whether a tensor changes in place: its version, or its value where nobody counts."""


def state_of(tensor: Tensor, derived: Callable[[Tensor], bool] | None = None) -> TensorState:
    """What `has_changed` is to be asked with later.

    Args:
        tensor: the tensor.
        derived: tells whether a tensor is derived. Such a one needs no value: where nobody counts it crosses a cut as
            it is then.
    """
    if not tensor.is_inference():
        return tensor._version
    return None if derived is not None and derived(tensor) else tensor.clone()


def has_changed(tensor: Tensor, state: TensorState) -> bool:
    """Whether a tensor has changed since."""
    if isinstance(state, int):
        return tensor._version != state
    return state is not None and not torch.equal(tensor, state)
