"""What kinds of torch functions there are, as far as the tracker must know.

Tags and schemas of torch's own operations say what they do. Functions that are written in Python are listed by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.intercept.call_record import LEAF, Value
from lightning_pipe.torch_internals import tree_flatten, tree_leaves

# ruff: noqa: SIM905  a table of names is easier to read as words than as a list of strings

METADATA = frozenset(
    """
    size dim stride numel nelement element_size storage_offset is_contiguous is_floating_point is_complex is_pinned
    ndimension get_device __len__ __hash__ __repr__ __str__ __format__ has_names is_same_size is_tensor is_storage
    result_type
    """.split()
) | frozenset(
    f"{name}.__get__"
    for name in """
    shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    names itemsize nbytes output_nr _version _base retains_grad grad
    """.split()
)
"""Functions that look at a tensor without reading its value: they run as they are and are not recorded."""

AUTOGRAD = frozenset("requires_grad_ retain_grad register_hook record_stream".split())
"""Functions that concern the graph or the memory of a tensor: a stage without it has nothing to do."""


_Packet, _Overload = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)


_DRAWING = frozenset(
    """
    dropout1d dropout2d dropout3d gumbel_softmax multi_head_attention_forward fractional_max_pool2d
    fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices lobpcg pca_lowrank
    svd_lowrank kaiming_normal_ kaiming_uniform_ orthogonal_ sparse_ trunc_normal_ xavier_normal_ xavier_uniform_
    """.split()
)
"""Functions in Python that draw random numbers, of which torch says nothing."""


@cache
def is_random(name: str) -> bool:
    """Whether functions of torch with this name draw random numbers, or may.

    Example:
        >>> is_random("native_dropout"), is_random("relu")
        (True, False)
    """
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, _Packet) else ()  # type: ignore[no-untyped-call]
    seeded = torch.Tag.nondeterministic_seeded
    return name in _DRAWING or any(seeded in getattr(packet, overload).tags for overload in overloads)


_NORMS = frozenset("batch_norm instance_norm".split())
_EMBEDDINGS = frozenset("embedding embedding_bag".split())


def draws(func: Any, name: str) -> bool:
    """Whether a function may draw random numbers, which then come from a stream of its own.

    Of torch's functions it is known; of what others have written nothing is. States of generators would tell what a
    call drew, but only after it, and threads share them.
    """
    if isinstance(func, (FunctionType, MethodType)) and str(func.__module__).startswith("torch."):
        return is_random(name)
    return is_random(name) or isinstance(func, (FunctionType, MethodType, _Packet, _Overload))


@cache
def _inplace_position(name: str) -> int | None:
    """The position of ``inplace`` among the arguments of a function of ``torch.nn.functional``."""
    function = getattr(F, name, None)
    names = list(inspect.signature(function).parameters) if isinstance(function, FunctionType) else []
    return names.index("inplace") if "inplace" in names else None


def function_name(func: Any) -> str:
    """The name under which a torch function is recorded; property getters get their property's name."""
    name: str | None = getattr(func, "__name__", None)
    if name in ("__get__", "__set__"):
        return f"{getattr(func.__self__, '__name__', '')}.{name}"
    return str(func) if name is None else name


MIRRORED: dict[str, Callable[..., Any]] = {"gt": torch.lt, "ge": torch.le}
"""Comparisons, and what they are with their arguments in the other order: they are recorded in one of the two."""


@cache
def _changes_first(name: str) -> bool:
    """Whether functions of this name change their first argument: `x.add_(1)`, `x.data = y`, `x += 1`, `x[0] = 1`."""
    named = name.endswith(".__set__") or (name.endswith("_") and not name.endswith("__"))
    # an assignment such as ``+=`` has a twin without the ``i``
    twin = name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}")
    return named or twin or name == "__setitem__"


def changed_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a torch function changes in place, by torch's naming rule; statistics and norms besides."""
    found: Iterable[Any]
    if name in _NORMS:
        given = dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | kwargs
        changes = given.get("training") or given.get("use_input_stats")  # of the one and the other, never left out here
        found = [given.get("running_mean"), given.get("running_var")] if changes else []
    elif name in _EMBEDDINGS:
        found = [] if kwargs.get("max_norm") is None else [kwargs.get("weight", args[1] if len(args) > 1 else None)]
    elif _changes_first(name):
        found = args[0] if name.startswith("_foreach") else args[:1]
    elif (at := _inplace_position(name)) is not None and kwargs.get("inplace", at < len(args) and args[at]):
        found = args[:1]
    elif (out := kwargs.get("out")) is None:
        return []
    else:
        found = out if isinstance(out, (tuple, list)) else [out]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


_ADDRESSES = frozenset("data_ptr _cdata.__get__".split())
"""Functions whose numbers mean nothing on another rank."""


def values_read(name: str, result: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """What a function reads from tensors if that is nothing, numbers, text or arrays: structure and leaves."""
    if name in _ADDRESSES or result is None:
        return LEAF, (None if result is None else 0,)
    leaves, structure = tree_flatten(result)
    if not all(isinstance(leaf, (bool, int, float, complex, str, np.ndarray)) for leaf in leaves):
        return None
    return structure, tuple(Value.of(leaf) for leaf in leaves)


def results_of(result: Any, written: Iterable[Tensor]) -> list[Tensor]:
    """The tensors a call leaves behind: its results and what it wrote to, each object once."""
    leaves = [result] if isinstance(result, Tensor) else [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    leaves += [tensor for tensor in written if all(tensor is not leaf for leaf in leaves)]
    return leaves


def unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each object once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())


FLAT = {Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device}
"""Types that hold nothing else: most arguments are of one of them and need no search."""


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call's arguments."""
    leaves = [*args, *kwargs.values()]
    return leaves if FLAT.issuperset(map(type, leaves)) else tree_leaves((args, kwargs))


def keywords_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of a call's keyword arguments, and the keys of dictionaries among all."""
    return [*kwargs, *(str(key) for each in (*args, *kwargs.values()) if isinstance(each, dict) for key in each)]
