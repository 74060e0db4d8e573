"""Parameters whose values other ranks have: of their layers, and of modules outside once it is known who uses them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.pipeline.cut.functions import RANDOM, changed_in_place, function_name
from lightning_pipe.pipeline.cut.placeholder import Placeholder, shape_only
from lightning_pipe.torch_internals import DisableTorchFunctionSubclass, tree_map

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

    Code that goes over all parameters of a module (averaged copies of the weights, limits on them, initialisations) may
    change it in place: nothing happens, but random numbers are drawn as for the true one, so that the next ones are the
    same on all ranks. What is computed from it is absent as well, reading a value raises
    :class:`~lightning_pipe.errors.CutError`, and a tensor with a value that is changed by it becomes NaN; a parameter
    must not be.
    """

    @classmethod
    def like(cls, parameter: nn.Parameter) -> Absent:
        """Stand for a parameter."""
        return cls._make(tuple(parameter.shape), parameter.dtype, parameter.device, parameter.requires_grad)

    @classmethod
    def _make(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Absent:
        value = math.nan if dtype.is_floating_point else 0  # what torch lets through is no number either
        data = torch.full((), value, dtype=dtype, device=device).expand(shape)
        absent: Absent = Tensor._make_subclass(cls, data, requires_grad)
        return absent

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        copy = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = Absent.like(self)
        return copy

    def __copy__(self) -> Absent:
        return Absent.like(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CutError(
            f"a parameter {tuple(self.shape)} {self.dtype} cannot be pickled or saved: another rank has its value.",
            hint="Use trainer.save_checkpoint(), on all ranks; after fit every rank has the whole module again.",
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function_name(func)
        with DisableTorchFunctionSubclass():
            if name in _METADATA or (name.rpartition(".")[2] in _ACCESS and name != "data.__get__"):
                return func(*args, **kwargs)
            if name in RANDOM or getattr(func, "__module__", None) == nn.init.__name__:
                _draw(func, args, kwargs)
            if name.startswith("_foreach_"):
                return _without_absent(func, name, args, kwargs)
            if args and isinstance(args[0], Absent):
                return _of_absent(func, name, args, kwargs)
            changed = changed_in_place(name, args, kwargs)
            for tensor in changed:
                if not isinstance(tensor, Absent):
                    _forget(tensor, name)
            return changed[0] if changed else _unknown(func, args, kwargs)


_ACCESS = frozenset(["__get__", "__set__", "__delete__"])


@torch.no_grad()
def _draw(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Draw the random numbers that ``func`` draws for the true parameters."""

    def real(leaf: Any) -> Any:
        return torch.ones(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, Absent) else leaf

    args, kwargs = tree_map(real, (args, {name: value for name, value in kwargs.items() if name != "out"}))
    func(*args, **kwargs)


def _forget(tensor: Tensor, name: str) -> None:
    """Make a tensor NaN because ``name`` changes it by what is not known: it must never be a stale number.

    Raises:
        CutError: it is a parameter, or has no NaN.
    """
    if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        raise CutError(
            f"'{name}' changes a tensor {tuple(tensor.shape)} {tensor.dtype} by one that another rank has.",
            hint="Only tensors of one rank can follow each other: a teacher whose layers follow a student's needs one "
            "device. For averaged weights use Lightning's callback EMAWeightAveraging.",
        )
    if name != "copy_" and not name.startswith("_foreach_"):  # callbacks that average weights use these
        warnings.warn(
            f"'{name}' changes a tensor {tuple(tensor.shape)} by a parameter that another rank has: it is NaN from now "
            "on. For averaged weights use Lightning's callback EMAWeightAveraging.",
            stacklevel=4,
        )
    tensor.detach().fill_(math.nan)


def _of_absent(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What a function with an absent tensor as its first argument returns."""
    absent = args[0]
    if changed_in_place(name, args, kwargs):
        return absent
    if name in _SAME or name == "data.__get__":
        return _like(absent, absent)
    if name in _MOVED:
        options = {key: value for key, value in kwargs.items() if key != "memory_format"}
        return _like(absent, func(absent.new_zeros(()), *args[1:], **options))
    return _unknown(func, args, kwargs)


def _like(shaped: Tensor, sample: Tensor) -> Absent:
    """An absent tensor of the same shape with the dtype and device of a sample."""
    return Absent._make(tuple(shaped.shape), sample.dtype, sample.device, False)


def _without_absent(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Call a function of lists of tensors for those positions at which none is absent."""
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    length = max(map(len, lists))
    kept = [
        position
        for position in range(length)
        if not any(len(each) == length and isinstance(each[position], Absent) for each in lists)
    ]

    for position, tensor in enumerate(changed_in_place(name, args, kwargs)):
        if position not in kept and not isinstance(tensor, Absent):
            _forget(tensor, name)

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
