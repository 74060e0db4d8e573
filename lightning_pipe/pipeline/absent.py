"""Parameters outside the layers whose values other ranks have, once it is known who uses them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_pipe.pipeline.cut.placeholder import Placeholder, shape_only

# Functions that look at a tensor without its value.
_METADATA = frozenset(
    [
        *["size", "dim", "stride", "numel", "nelement", "element_size", "storage_offset", "ndimension", "get_device"],
        *["is_contiguous", "is_floating_point", "is_complex", "is_pinned", "is_tensor", "has_names", "__len__"],
        *[
            "__hash__",
            "untyped_storage",
            "data_ptr",
            "requires_grad_",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "retain_grad",
        ],
    ]
)
# Functions whose result has the same values, elsewhere or in another form.
_SAME = frozenset(["clone", "detach", "contiguous"])
_MOVED = frozenset(["to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16", "type_as"])


class Absent(nn.Parameter):
    """A parameter with the shape, dtype and device of the true one, without its memory and value.

    Code that goes over all parameters of a module (averaged copies of the weights, limits on them) may change it in
    place: nothing happens, as with the layers of other ranks. What is computed from it is absent as well, reading a
    value raises :class:`~lightning_pipe.errors.CutError`, and a tensor that it is copied into becomes NaN.
    """

    @classmethod
    def like(cls, parameter: nn.Parameter) -> Absent:
        """Stand for a parameter."""
        return cls._make(tuple(parameter.shape), parameter.dtype, parameter.device, parameter.requires_grad)

    @classmethod
    def _make(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Absent:
        data = torch.zeros((), dtype=dtype, device=device).expand(shape)
        absent: Absent = Tensor._make_subclass(cls, data, requires_grad)
        return absent

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = Absent.like(self)
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _METADATA or (name in ("__get__", "__set__", "__delete__") and (name, attribute) != _DATA):
                return func(*args, **kwargs)
            if name.startswith("_foreach_"):
                return _without_absent(func, args, kwargs)
            if args and isinstance(args[0], Absent):
                return _of_absent(func, name, args, kwargs)
            if name == "copy_" and args[0].is_floating_point():
                return args[0].fill_(math.nan)  # a copy of what is not known, never a stale number
            return _unknown(func, args, kwargs)


_DATA = ("__get__", "data")


def _of_absent(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What a function with an absent tensor as its first argument returns."""
    absent = args[0]
    if name.endswith("_") and not name.endswith("__"):
        return absent  # changed in place
    if name in _SAME or name == "__get__":
        return _like(absent, absent)
    if name in _MOVED:
        options = {key: value for key, value in kwargs.items() if key != "memory_format"}
        return _like(absent, func(absent.new_zeros(()), *args[1:], **options))
    return _unknown(func, args, kwargs)


def _like(shaped: Tensor, sample: Tensor) -> Absent:
    """An absent tensor of the same shape with the dtype and device of a sample."""
    return Absent._make(tuple(shaped.shape), sample.dtype, sample.device, False)


def _without_absent(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of lists of tensors for those positions at which none is absent."""
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    length = max(map(len, lists))
    kept = [
        position
        for position in range(length)
        if not any(len(each) == length and isinstance(each[position], Absent) for each in lists)
    ]

    def select(arg: Any) -> Any:
        if isinstance(arg, list | tuple) and len(arg) == length:
            return [arg[position] for position in kept]
        return arg

    if kept:
        func(*map(select, args), **{key: select(arg) for key, arg in kwargs.items()})


def _unknown(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of a function in shape, dtype and device alone; an error if it is to be a number."""
    result = shape_only(func, args, kwargs)
    return tree_map(lambda leaf: _like(leaf, leaf) if isinstance(leaf, Placeholder) else leaf, result)
