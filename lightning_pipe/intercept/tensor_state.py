"""Notices that tensors change in place: the one place that asks for versions and compares values.

Autograd counts the changes, and knows what a view is a view of, but not for tensors that are made in inference mode
(torch 2.13), which cannot change in place outside of it. So neither steps nor layers run in it; what the user's code
computes in it between layers nothing changes there.

Autograd does not count what changes by the ``.data`` and ``.numpy()`` of a tensor either. One device runs the backward
pass of a micro-batch before the next forward pass; a pipeline runs others in between, and puts back what stages before
the last one have changed. Where a graph holds a tensor whose value is another one by then, autograd says so (and
`engine.stage` says why), but for these::

    self.mean.mul_(0.5)
    h = h * self.mean.data      the graph holds its memory, and has another value after the next write to `mean`
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipe.errors import CutError
from lightning_pipe.torch_internals import is_functorch_tensor, uses

UNCOUNTED = frozenset(["data.__get__", "detach", "numpy", "__array__"])
"""Functions whose results share the memory of their argument and are no views: they may not count its changes."""

_taken: list[tuple[int | None, weakref.ref[Any]]] = []
"""Addresses of memory, with the results of `UNCOUNTED` that share it. One that a graph holds lives as long as that."""


@contextmanager
def counting() -> Iterator[None]:
    """Outside of inference mode, without gradients where that was on: tensors that are made inside count changes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def version_of(value: Any) -> int | None:
    """How often a tensor was changed in place; ``None`` where nobody counts: in inference mode, and for arrays."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def copy_of(value: Any) -> Any:
    """A tensor or array of its own with the same values."""
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def place_of(value: Any) -> Any:
    """Where a plain tensor has its values, and its shape. While it is kept no other memory is there.

    An address alone comes back: what is swapped for a tensor may get the memory that this has given up.
    """
    if type(value) is not Tensor or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage()), value.data_ptr(), value.shape  # type: ignore[no-untyped-call]


def same_values(one: Any, other: Any) -> bool:
    """Whether two tensors, or two arrays, have the same type, shape and values. NaN is the same as NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:  # `torch.equal` does not look at types (torch 2.13)
        return False
    if isinstance(one, Tensor) and torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def memory_of(tensor: Tensor) -> int | None:
    """What is the same for tensors that share memory, while they live; ``None`` for those that have none."""
    if tensor.layout is not torch.strided or is_functorch_tensor(tensor):
        return None
    return int(tensor.untyped_storage()._cdata)


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
