"""Notices that tensors change in place: the one place that asks for versions and compares values.

Autograd counts the changes, and knows what a view is a view of, but not for tensors that are made in inference mode
(torch 2.13), which cannot change in place outside of it. So neither steps nor layers run in it; what the user's code
computes in it between layers nothing changes there.

Autograd does not count what changes by the ``.data`` and ``.numpy()`` of a tensor either. So in steps ``.data`` is
``.detach()``, and an array is a copy, into which nothing may be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipe.torch_internals import is_functorch_tensor


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
    """The type of a value, and of a plain tensor where it has its values. While it is kept no other memory is there.

    An address alone comes back: what is swapped for a tensor may get the memory that this has given up.
    """
    if type(value) is not Tensor or value.layout is not torch.strided:
        return type(value)
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
