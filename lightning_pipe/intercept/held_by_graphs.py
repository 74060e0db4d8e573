"""Lets tensors change in place that graphs of other micro-batches hold.

One device runs the backward pass of a micro-batch before the next forward pass; a pipeline runs others in between::

    def training_step(self, batch):     micro-batch 0               micro-batch 1
        self.tau.mul_(0.9)              0.9                         0.81
        h = self.layer(h, self.tau)     its graph holds tau ...     ... whose memory has just changed
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipe.torch_internals import (
    DisableTorchFunction,
    is_functorch_tensor,
    set_versions,
    storage_uses,
    swap_insides,
    uses,
)

SHARING = frozenset(["data.__get__", "numpy"])
"""Functions whose results share the memory of their argument, without its count of changes."""


def let_go(tensors: Sequence[Tensor]) -> None:
    """Some tensors are about to change in place: what graphs hold of them keeps its value.

    Graphs get a copy. The tensors stay the same objects in the same memory, for all who refer to them. Where something
    unknown shares the memory, which a graph may hold, all stays as it is, and autograd notices the change.

    Args:
        tensors: those that change, with what they are views of.
    """
    for tensor in tensors:
        if type(tensor) is Tensor and tensor._base is None and not tensor.requires_grad:
            views = [each for each in tensors if each._base is tensor]
            if uses(tensor) > 1 + len(views) and _is_known(tensor, views):
                _let_go(tensor, views)


def _is_known(tensor: Tensor, views: Sequence[Tensor]) -> bool:
    """Whether nothing but a tensor and some views share its memory."""
    if tensor.is_inference() or tensor.layout is not torch.strided or is_functorch_tensor(tensor):
        return False
    shared = storage_uses(tensor.untyped_storage()._cdata) - 1  # the one asked
    return shared == 1 + len(views) and all(type(view) is Tensor for view in views)


def _let_go(tensor: Tensor, views: Sequence[Tensor]) -> None:
    with DisableTorchFunction(), torch.no_grad():
        version, own = tensor._version, tensor.data
        tensor.data = tensor.clone()
        # graphs hold what is inside the object: it gets another inside
        swap_insides(tensor, own)
        set_versions((tensor,), (version,))
        for view in views:
            swap_insides(view, tensor.as_strided(view.shape, view.stride(), view.storage_offset()))
