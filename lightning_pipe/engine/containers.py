"""The containers that batches are made of: what they hold, copies of them, and what tells their shapes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.engine.batch_kinds import kind_of
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.incoming import nodes_behind
from lightning_pipe.tensor_spec import TensorSpec


def children(node: Any) -> dict[Any, Any] | None:
    """What a container holds by key, position or name; ``None`` for a leaf.

    Mappings of every kind (Hugging Face's ``BatchEncoding`` too), lists, tuples and dataclasses are containers. What is
    cut by functions of its own is a leaf.
    """
    if isinstance(node, Tensor) or kind_of(node) is not None:
        return None
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    if isinstance(node, Mapping):
        return dict(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        # with what ``__post_init__`` has made of the fields, which is cut as they are
        return {name: getattr(node, name) for name in dict.fromkeys([*fields, *getattr(node, "__dict__", ())])}
    return None


def rebuild(node: Any, contents: dict[Any, Any]) -> Any:
    """A container like another one, with other contents."""
    if type(node) is dict:
        return contents
    if isinstance(node, list | tuple):
        make: Callable[..., Any] = getattr(type(node), "_make", type(node))  # named tuples
        return make(contents.values())
    clone: Any = copy.copy(node)  # no constructor: it may take other arguments, or change what it is given
    if isinstance(node, Mapping):
        for name, value in getattr(clone, "__dict__", {}).items():
            if isinstance(value, dict):  # the copy would write into that of the original
                object.__setattr__(clone, name, copy.copy(value))
        for key, child in contents.items():
            clone[key] = child
        return clone
    for name, child in contents.items():
        object.__setattr__(clone, name, child)
    return clone


def map_leaves(function: Callable[[Any], Any], node: Any) -> Any:
    """The same containers anew, with ``function`` of every leaf."""
    contents = children(node)
    if contents is None:
        return function(node)
    return rebuild(node, {key: map_leaves(function, child) for key, child in contents.items()})


def fresh(micro_batch: Any) -> Any:
    """A micro-batch that a step may take apart: new containers and new tensors, with the strides of the old ones.

    Example:
        >>> import torch
        >>> batch = {"x": torch.zeros(2)}
        >>> _ = fresh(batch).pop("x").add_(1)
        >>> batch
        {'x': tensor([0., 0.])}
    """
    return map_leaves(_copy, micro_batch)


def _copy(leaf: Any) -> Any:
    """A copy of a tensor, or of what may hold some, which the step may change, too. Iterators go on for all runs."""
    if isinstance(leaf, Tensor):
        return _copy_tensor(leaf)
    if hasattr(type(leaf), "__next__"):
        return leaf
    try:
        return leaf.clone() if hasattr(type(leaf), "clone") else copy.deepcopy(leaf)
    except Exception as error:
        raise CutError(
            f"a {type(leaf).__qualname__} in the batch cannot be copied: {error}",
            hint="Every stage runs the step on a copy of the batch: let copy.deepcopy copy it, or give tensors.",
        ) from error


def _copy_tensor(tensor: Tensor) -> Tensor:
    behind = nodes_behind([tensor]) if tensor.requires_grad else ()
    if behind and any(isinstance(getattr(node, "variable", None), nn.Parameter) for node in behind):
        raise CutError(
            f"a tensor {tuple(tensor.shape)} of the batch is computed from parameters before the step, which every "
            "stage runs for itself.",
            hint="Compute it in the step, or detach() it.",
        )
    clone = tensor.detach().clone()  # the stages of one rank share no graph
    if clone.layout is torch.strided and not clone.is_nested and clone.stride() != tensor.stride():
        clone = TensorSpec.of(tensor).lay_out(clone)  # they decide whether contiguous() returns the tensor or a copy
    return clone.requires_grad_() if tensor.requires_grad else clone


def signature(node: Any) -> Hashable:
    """What may decide the shapes and the path of a step: structure, shapes, dtypes, and plain values.

    Not those in sequences of numbers alone, one for each sample: every batch would be another one.

    Example:
        >>> import torch
        >>> signature({"x": torch.zeros(2, 3)}) == signature({"x": torch.ones(2, 3)})
        True
        >>> signature({"x": torch.zeros(2, 3)}) == signature({"x": torch.zeros(1, 3)})
        False
    """
    if isinstance(node, Tensor):
        return tuple(node.shape), node.dtype
    contents = children(node)
    if contents is not None:
        if isinstance(node, list | tuple) and all(isinstance(child, int) for child in node):
            return type(node), len(node)
        return type(node), tuple((str(key), signature(child)) for key, child in contents.items())
    return ("", node) if node is None or isinstance(node, bool | int) else ("", type(node))
