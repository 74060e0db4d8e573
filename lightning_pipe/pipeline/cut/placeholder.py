"""Tensors that stand for values only another stage has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_pipe.errors import CutError


class Placeholder(Tensor):
    """A tensor with the shape, dtype and device of the real one, and no value.

    The user's code may look at shapes, dtypes and devices and may call torch on it; the results are placeholders too.
    Reading a value raises :class:`~lightning_pipe.errors.CutError`. It is a type of its own, so that a placeholder can
    never be mistaken for a value by a layer or a loss.
    """

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Placeholder:
        make = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        placeholder: Placeholder = make(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device)
        placeholder.meta = meta
        return placeholder

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        return shape_only(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return Placeholder(self.meta, self.device)

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Placeholder:
        """A contiguous placeholder."""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), device)


def shape_only(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` for the shape, dtype and device of its result alone; tensors come back as placeholders.

    An argument that ``func`` changes in place is returned as the same object, as torch does.
    """
    originals: dict[int, Tensor] = {}
    device: torch.device | None = None

    def to_meta(value: Any) -> Any:
        nonlocal device
        if isinstance(value, Tensor):
            if device is None or isinstance(value, Placeholder):
                device = value.device
            if isinstance(value, Placeholder):
                meta = value.meta
            else:
                meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            originals[id(meta)] = value
            return meta
        return value

    def to_placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        original = originals.get(id(value))
        # ``to`` returns its argument when nothing changes: the same object must come back, unless it moved.
        if original is not None and original.device == device:
            if original.shape != value.shape:
                raise CutError(
                    f"'{function_name(func)}' changes the shape of a tensor in place before this stage has its value.",
                    hint="Use the out-of-place form.",
                )
            return original
        return Placeholder(value, device or torch.device("cpu"))

    with torch.no_grad():
        meta_args, meta_kwargs = tree_map(to_meta, (args, dict(kwargs)))
        moved = _redirect(func, meta_args, meta_kwargs)
        if moved is not None:
            meta_args, meta_kwargs, device = moved
        try:
            result = func(*meta_args, **meta_kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            raise CutError(
                f"'{function_name(func)}' needs the value of a tensor that only another stage has "
                f"(it is computed by, or from, layers or parameters of an earlier stage): {error}",
                hint="Read values only after the last layer, or inside a layer; shapes, dtypes and devices can be read anywhere.",
            ) from error
    return tree_map(to_placeholder, result)


def function_name(func: Any) -> str:
    """The name under which a torch function is recorded; property getters get their property's name."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(func.__self__, '__name__', '')}.{name}"
    return str(name)


_MOVES: dict[str, str] = {"cpu": "cpu", "cuda": "cuda"}


def _redirect(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.device] | None:
    """Keep a call that names a device on meta, and say which device its result would have been on."""
    name = getattr(func, "__name__", "")
    if name in _MOVES and not isinstance(func, torch._ops.OpOverload):
        return (args[0],), {}, torch.device(_MOVES[name], *(a for a in args[1:] if isinstance(a, int)))
    if kwargs.get("device") is not None:
        return args, {**kwargs, "device": "meta"}, torch.device(kwargs["device"])
    if name == "to" and len(args) > 1 and isinstance(args[1], (str, torch.device, int)):
        return (args[0], "meta", *args[2:]), kwargs, torch.device(args[1])
    return None
