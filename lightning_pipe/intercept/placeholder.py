"""Tensors that stand for values only another stage has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.hooks import RemovableHandle

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.torch_functions import FLAT, function_name
from lightning_pipe.tensor_spec import TensorSpec, numbered
from lightning_pipe.torch_internals import disabled_torch_function, tree_map

_VALUES = "Do it after the last layer, or inside a layer; shapes, dtypes and devices can be read anywhere."
_NESTED = "Use nested tensors inside layers alone, and between them a padded tensor with its lengths."


class Placeholder(Tensor):
    """A tensor with the shape, dtype and device of the real one, and no value.

    The user's code may look at shapes, dtypes and devices and may call torch on it; the results are placeholders too.
    Reading a value raises :class:`~lightning_pipe.errors.CutError`. It is a type of its own, so that a placeholder can
    never be mistaken for a value by a layer or a loss.
    """

    differentiable: bool = False
    """Whether the tensor that it stands for requires a gradient."""

    def __new__(cls, spec: TensorSpec, device: torch.device) -> Placeholder:
        """Stand for a tensor as ``spec`` says, on ``device`` unless that names another kind."""
        moved = device if spec.device is None else numbered(torch.device(spec.device))
        make = Tensor._make_wrapper_subclass
        placeholder: Placeholder = make(cls, spec.shape, strides=spec.strides, dtype=spec.dtype, device=moved)
        return placeholder

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what reaches the placeholder past the tracker: copies, and what runs inside torch.func."""
        if func._schema.is_mutable:
            name = str(func._schema.name).removeprefix("aten::")
            raise CutError(
                f"'{name}' changes a tensor in place, with or for one that only another stage has, and torch does not "
                "show such changes to this stage.",
                hint="Use own.copy_(other), or bind the name anew: own = other; inside torch.func the out-of-place "
                "form.",
            )
        return shape_only(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __format__(self, spec: str) -> str:
        if spec and has_torch_function_unary(self):  # the tracker knows what the stage with the value has read
            return str(handle_torch_function(Tensor.__format__, (self,), self, spec))
        if spec:
            raise CutError("formatting needs the value of a tensor that only another stage has.", hint=_VALUES)
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if has_torch_function_unary(self):  # the tracker follows, as it does where the tensor has a value
            return handle_torch_function(Tensor.__deepcopy__, (self,), self, memo)
        return Placeholder(TensorSpec.of(self), self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CutError("pickling needs the value of a tensor that only another stage has.", hint=_VALUES)


FLAT.add(Placeholder)


def no_hook(*_: Any) -> RemovableHandle:
    """What registering a hook returns where there is no graph: the stage that has it runs the hook."""
    return RemovableHandle(OrderedDict())


class _NoNode:
    """Stands for the node of a placeholder that stands for a tensor with a graph."""

    next_functions = ()
    register_hook = register_prehook = no_hook


KNOWN: dict[str, Callable[[Placeholder], Any]] = {
    "requires_grad.__get__": lambda placeholder: placeholder.differentiable,
    "grad_fn.__get__": lambda placeholder: _NoNode() if placeholder.differentiable else None,
}
"""What is known of a tensor without its value."""


def shape_only(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` for the shape, dtype and device of its result alone; tensors come back as placeholders.

    An argument that ``func`` returns is returned as the same object, as torch does.
    """
    originals: dict[int, Tensor] = {}

    def to_meta(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        originals[id(meta)] = value
        return meta

    def to_placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        original = originals.get(id(value))
        same = original is not None and original.device == device
        return original if same else Placeholder(TensorSpec.of(value), device)

    meta_args, meta_kwargs = tree_map(to_meta, (args, dict(kwargs)))
    given = sorted(originals.values(), key=lambda tensor: not isinstance(tensor, Placeholder))
    device = given[0].device if given else torch.device("cpu")
    if kwargs.get("device") is not None:
        device, meta_kwargs["device"] = numbered(torch.device(kwargs["device"])), "meta"
    try:
        with torch.no_grad():
            result = func(*meta_args, **meta_kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        raise no_value(func, error) from error
    return tree_map(to_placeholder, result)


def no_value(func: Callable[..., Any], reason: object) -> CutError:
    """The error for a function that needs the value of a placeholder."""
    return CutError(
        f"'{function_name(func)}' needs the value of a tensor that only another stage has "
        f"(it is computed by, or from, layers or parameters of an earlier stage): {reason}",
        hint=_NESTED if "nested_tensor" in function_name(func) else _VALUES,
    )
