"""Memory that changes unseen: autograd counts changes of a tensor, but not for its ``.data`` and ``.numpy()``.

One device runs the backward pass of a micro-batch before the next forward pass; a pipeline runs others in between, and
puts back what stages before the last one have changed. Where a graph holds a tensor whose value is another one by then,
autograd says so (and `engine.stage` says why), but for these::

    self.mean.mul_(0.5)
    h = h * self.mean.data      the graph holds its memory, and has another value after the next write to `mean`
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.tensor_state import memory_of
from lightning_pipe.torch_internals import uses

UNCOUNTED = frozenset(["data.__get__", "detach", "numpy", "__array__"])
"""Functions whose results share the memory of their argument and are no views: they may not count its changes."""

_taken: list[tuple[int | None, weakref.ref[Any]]] = []
"""Addresses of memory, with the results of `UNCOUNTED` that share it. One that a graph holds lives as long as that."""


def note_uncounted(tensors: Iterable[Tensor], result: Any) -> None:
    """A step has taken the ``.data``, ``.detach()`` or ``.numpy()`` of a tensor."""
    _taken[:] = [each for each in _taken if each[1]() is not None]
    _taken.extend((memory_of(tensor), weakref.ref(result)) for tensor in tensors)


def check_counted(changing: Iterable[Tensor]) -> None:
    """Raise if tensors that are about to change in place have memory that a graph holds, which would not notice.

    Raises:
        CutError: a graph holds the ``.data`` or ``.detach()`` of one, or somebody its ``.numpy()``.
    """
    memories = {memory_of(tensor) for tensor in changing} - {None} if _taken else ()
    for memory, reference in _taken:
        holder = reference() if memory in memories else None
        if holder is not None and (not isinstance(holder, Tensor) or uses(holder) > 1):  # 1: Python's own
            raise CutError(
                f"a tensor of shape {tuple(holder.shape)} changes in place while its `.data`, `.detach()` or "
                "`.numpy()` is held, perhaps for a backward pass: that would compute with the new value.",
                hint="Compute with the tensor itself, or with a copy: `.detach().clone()`.",
            )
