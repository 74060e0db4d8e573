"""Tensors that stand for values only another stage has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.hooks import RemovableHandle

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.torch_functions import FLAT, function_name
from lightning_pipe.tensor_spec import TensorSpec, numbered
from lightning_pipe.torch_internals import disabled_torch_function, tree_leaves, tree_map

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
    _meta: Tensor | None = None

    def __new__(
        cls, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device
    ) -> Placeholder:
        """Stand for a tensor of this shape on ``device``; strides of ``None`` are those of a contiguous one."""
        make = Tensor._make_wrapper_subclass
        placeholder: Placeholder = make(cls, shape, strides=strides, dtype=dtype, device=device)
        return placeholder

    @property
    def meta(self) -> Tensor:
        """A tensor like it on the meta device."""
        if self._meta is None:
            self._meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return self._meta

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what reaches the placeholder past the tracker, inside custom functions for instance."""
        if func._schema.is_mutable:
            _check_followed(func, args, kwargs or {})
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
        return Placeholder.like(self, self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CutError("pickling needs the value of a tensor that only another stage has.", hint=_VALUES)

    @classmethod
    def of(cls, spec: TensorSpec, device: torch.device) -> Placeholder:
        """A placeholder with the shape, dtype and strides of ``spec``."""
        return cls(spec.shape, spec.strides, spec.dtype, device)

    @classmethod
    def like(cls, tensor: Tensor, device: torch.device) -> Placeholder:
        """A placeholder with the shape, dtype and strides of ``tensor``."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, device)


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


def _check_followed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise if a change in place that the tracker cannot see reaches a tensor with a value, or moves one."""
    given = {**dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)), **kwargs}
    written = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    name = str(func._schema.name).removeprefix("aten::")
    if name == "set_" or any(isinstance(t, Tensor) and not isinstance(t, Placeholder) for t in tree_leaves(written)):
        raise CutError(
            f"'{name}' changes a tensor in place, with or for one that only another stage has, and torch does not show "
            "such changes to this stage.",
            hint="Use own.copy_(other), or bind the name anew: own = other; inside torch.func the out-of-place form.",
        )


def shape_only(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` for the shape, dtype and device of its result alone; tensors come back as placeholders.

    An argument that ``func`` changes in place is returned as the same object, as torch does.
    """
    call = _Shapes()
    with torch.no_grad():
        meta_args, meta_kwargs = tree_map(call.to_meta, (args, dict(kwargs)))
        meta_func, meta_args, meta_kwargs = call.redirect(func, meta_args, meta_kwargs)
        try:
            result = meta_func(*meta_args, **meta_kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            raise CutError(
                f"'{function_name(func)}' needs the value of a tensor that only another stage has "
                f"(it is computed by, or from, layers or parameters of an earlier stage): {error}",
                hint=_NESTED if "nested_tensor" in function_name(func) else _VALUES,
            ) from error
    return tree_map(lambda value: call.to_placeholder(value, func), result)


def _nothing() -> None:
    """Does nothing."""


class _Shapes:
    """One call on meta tensors, with what is needed to come back from it."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._originals: dict[int, Tensor] = {}

    def to_meta(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.device is None or isinstance(value, Placeholder):
            self.device = value.device
        if isinstance(value, Placeholder):
            meta = value.meta
        else:
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._originals[id(meta)] = value
        return meta

    def redirect(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Keep a call that names a device on meta, and note which device its result would have been on."""
        name, given = getattr(func, "__name__", ""), args[1] if len(args) > 1 else None
        if name == "record_stream":  # there is no memory to keep
            return _nothing, (), {}
        if name in ("cpu", "cuda"):
            # a meta tensor has no such methods: they copy
            given = kwargs.get("device", given)
            self._move(torch.device(name, given) if type(given) is int else given or name)
            return Tensor.to, (args[0], "meta"), {}
        if name == "type" and (given := kwargs.get("dtype", given)) is not None:
            if not isinstance(given, torch.dtype):
                named = torch.empty(0).type(given)
                if self.device is None or self.device.type != named.device.type:
                    self._move(named.device)
                given = named.dtype
            return Tensor.to, (args[0], given), {}
        if kwargs.get("device") is not None:
            self._move(kwargs["device"])
            return func, args, {**kwargs, "device": "meta"}
        if name == "to" and isinstance(given := kwargs.get("other", given), Tensor):
            self._move(self._originals[id(given)].device)
        elif name == "to" and isinstance(given, (str, torch.device, int)):
            self._move(given)
            return func, (args[0], "meta", *args[2:]), kwargs
        return func, args, kwargs

    def _move(self, device: str | torch.device | int) -> None:
        """The result would have been on this device."""
        self.device = numbered(torch.device(device))

    def to_placeholder(self, value: Any, func: Any) -> Any:
        if torch.is_storage(value):
            raise CutError(f"'{function_name(func)}' asks for memory that only another stage has.", hint=_VALUES)
        if not isinstance(value, Tensor):
            return value
        original = self._originals.get(id(value))
        # ``to`` returns its argument when nothing changes: the same object must come back, unless it moved.
        if original is None or original.device != self.device:
            return Placeholder.like(value, self.device or torch.device("cpu"))
        if (original.shape, original.stride()) != (value.shape, value.stride()):
            raise CutError(
                f"'{function_name(func)}' changes the shape or strides of a tensor in place before this stage has its "
                "value.",
                hint="Use the out-of-place form.",
            )
        return original
