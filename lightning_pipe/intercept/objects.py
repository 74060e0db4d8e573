"""Objects that layers change, such as the key-value caches of Hugging Face's models.

Such an object is an argument of every layer, and each layer changes a part of it. The rank that runs the layer
describes the parts that have changed; the other ranks put them into their own object, with placeholders for the
tensors. So the keys and values of a layer stay on its rank, and the code between layers finds lengths everywhere.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.snapshot import refill
from lightning_pipe.intercept.tensor_state import version_of
from lightning_pipe.intercept.user_objects import attributes_of, walk
from lightning_pipe.torch_internals import tree_flatten

_PLAIN = (bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, dict)
_NO_OBJECTS = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def state_of(name: str, changed: Any, objects: Sequence[Any]) -> tuple[bytes, list[Tensor]]:
    """The state of an object that a call has changed, without its tensors, and these.

    Args:
        name: the layer that has been called, for messages.
        changed: the object.
        objects: those that the call's arguments lead to, which other ranks have as well.

    Raises:
        CutError: it is a kind of list or dictionary, whose items are not among its attributes, or its state cannot be
            pickled.
    """
    if isinstance(changed, _CONTAINERS):
        raise unseen(name, changed)
    file = io.BytesIO()
    pickler = _Pickler(file, objects)
    try:
        pickler.dump(dict(attributes_of(changed)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise unseen(name, changed, f": {error}") from error
    return file.getvalue(), pickler.tensors


def put_state(target: Any, state: bytes, tensors: Sequence[Any], objects: Sequence[Any]) -> None:
    """Let an object be in another state.

    Args:
        target: the object.
        state: what `state_of` made of it on another rank.
        tensors: what stands for the tensors.
        objects: what the arguments of the call here lead to, as `objects_of` lists them.
    """
    new: Mapping[str, Any] = _Unpickler(state, [*objects, *tensors]).load()
    # The object stays the same one: the user's code between the layers refers to it.
    attributes = attributes_of(target)
    merged = {name: _merged(attributes.get(name), value) for name, value in new.items()}
    attributes.clear()
    attributes.update(merged)


def objects_of(leaves: Sequence[Any]) -> list[Any]:
    """The objects that the leaves of a call's arguments lead to, in an order that is the same on all ranks."""
    return [each for each in walk([*leaves], _held) if _has_state(each)]


def _has_state(value: Any) -> bool:
    return (hasattr(value, "__dict__") or is_dataclass(value)) and not isinstance(value, _NO_OBJECTS)


def _held(value: Any) -> list[Any]:
    # a class that is derived from a list or dictionary has attributes, too
    attributes = attributes_of(value).values() if _has_state(value) else ()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
    return [*attributes, *items]


def _merged(old: Any, new: Any) -> Any:
    """The new value; in the old list or dictionary if it was one, to which others may refer."""
    if type(old) is not type(new) or not isinstance(old, list | dict):
        return new
    refill(old, new)
    return old


Content = tuple[Any, list[tuple[Any, int | None]]]
"""The structure of an object, and its leaves with the versions of tensors. They are held, so that no id comes again."""


def content_of(value: Any) -> Content:
    """The object's own attributes and containers; what objects in it hold is compared where they are listed."""
    items = dict(value) if isinstance(value, dict) else [*value] if isinstance(value, _CONTAINERS) else None
    leaves, structure = tree_flatten((items, dict(attributes_of(value))))
    return structure, [(leaf, version_of(leaf)) for leaf in leaves]


def unseen(name: str, changed: Any, why: str = ".") -> CutError:
    """A call changes an object that it is given."""
    kind = type(changed).__qualname__
    return CutError(
        f"'{name}' changes its argument of type {kind}, which other stages cannot see{why}",
        hint="Return what changes, or pass it in a list or dictionary of tensors, numbers and text; switch caches off.",
    )


def same_content(one: Content, other: Content) -> bool:
    """Whether an object holds what it did."""
    return one[0] == other[0] and all(
        version == now and (a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b))
        for (a, version), (b, now) in zip(one[1], other[1], strict=True)
    )


class _Pickler(pickle.Pickler):
    """Leaves out objects that the other ranks have, and tensors, whose numbers follow."""

    def __init__(self, file: io.BytesIO, objects: Sequence[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._known = {id(each): number for number, each in enumerate(objects)}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, Tensor):
            self.tensors.append(obj)
            return len(self._known) + len(self.tensors) - 1
        return self._known.get(id(obj))


class _Unpickler(pickle.Unpickler):
    """Puts in objects and tensors of this rank."""

    def __init__(self, data: bytes, there: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._there = there

    def persistent_load(self, pid: Any) -> Any:
        return self._there[pid]
