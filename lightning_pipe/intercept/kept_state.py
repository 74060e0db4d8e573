"""What layers and outside modules count or keep of their calls, besides tensors: numbers, lists, objects, buffers.

The stage that runs a module shows later stages what the call has made of these by value. So code behind the module
reads on every later stage what it reads on one device, and finds it there again in the next micro-batch.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.objects import ObjectStates, is_opaque
from lightning_pipe.intercept.slot_items import SlotItems
from lightning_pipe.intercept.snapshot import is_compared
from lightning_pipe.intercept.tensor_state import same_values, version_of
from lightning_pipe.intercept.user_classes import is_users
from lightning_pipe.torch_internals import DisableTorchFunction

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, bytearray, np.ndarray)
_MISSING = object()
_SHOWN = 1 << 16
"""Bytes up to which a value is shown to later stages."""

Place = tuple[str, str]
"""The path from a layer to a part of it, and the name of an attribute or buffer there."""


class _NotAloneError(Exception):
    """A value refers to tensors or modules."""


class KeptState:
    """What a module and its parts keep, before a call.

    Args:
        module: the layer or outside module.
        parts: whether its parts count, too.
        only_in_place: whether lists, dictionaries and objects alone count.
    """

    def __init__(self, module: nn.Module, *, parts: bool = True, only_in_place: bool = False) -> None:
        self._module, self._parts, self._only_in_place = module, parts, only_in_place
        self._before = {place: _Kept(value) for place, value in self._now()}

    def _now(self) -> Iterator[tuple[Place, Any]]:
        found = _kept(self._module.named_modules() if self._parts else [("", self._module)])
        if not self._only_in_place:
            return found
        return (each for each in found if not isinstance(each[1], (*_PLAIN, Tensor)))

    def changes(self) -> Iterator[tuple[Place, bytes | None]]:
        """Where the call has changed something, with the new value; ``None``: it cannot be shown."""
        for place, value in self._changed():
            yield place, shown(value)

    def places(self) -> list[Place]:
        """Where something has changed."""
        return [place for place, _ in self._changed()]

    def _changed(self) -> Iterator[tuple[Place, Any]]:
        for place, value in self._now():
            before = self._before.get(place)
            if before is None or before.differs(value):
                yield place, value

    def altered(self, place: Place) -> list[Any]:
        """The lists, dictionaries and objects that have changed in one of these places."""
        path, name = place
        before, part = self._before.get(place), self._module.get_submodule(path)
        return [] if before is None or name in part._buffers else before.altered(vars(part)[name])


class _Kept:
    """One value before a call, with what tells whether it changes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._content: Any = None
        if isinstance(value, Tensor):
            self._content = version_of(value)
            if self._content is None:
                self._content = value.clone()  # in inference mode nobody counts
        elif not isinstance(value, _PLAIN):
            self._content = _pickled(value)
            if self._content is None:
                self._content = ObjectStates([value])

    def differs(self, now: Any) -> bool:
        if isinstance(now, Tensor):
            if now is not self.value:
                return True
            before = self._content
            return not same_values(now, before) if isinstance(before, Tensor) else version_of(now) != before
        if isinstance(now, _PLAIN):
            return type(now) is not type(self.value) or (now is not self.value and now != self.value)
        if isinstance(self._content, ObjectStates):
            # tensors in lists and dictionaries are looked for elsewhere
            return bool(self._content.changed()) or (now is not self.value and is_opaque(now))
        return bool(_pickled(now) != self._content)

    def altered(self, now: Any) -> list[Any]:
        """What of the value of now has changed itself, of all lists, dictionaries and objects in it."""
        if isinstance(now, _PLAIN) or self._content is None:
            return []
        if isinstance(self._content, ObjectStates):
            return self._content.changed()
        return list(_altered(pickle.loads(self._content), now, set()))


def _altered(before: Any, now: Any, seen: set[int]) -> Iterator[Any]:
    """What of one value differs from what stands in its place in an earlier one, but for what is in it."""
    if isinstance(now, _PLAIN) or id(now) in seen:
        return
    seen.add(id(now))
    if type(before) is not type(now):
        yield now
        return
    if isinstance(now, (list, tuple, deque)):
        items, others = [*now], [*before]
    elif isinstance(now, dict) or has_content(now):
        found, former = (now, before) if isinstance(now, dict) else (content_of(now), content_of(before))
        if [*found] != [*former]:
            yield now
        keys = [key for key in found if key in former]
        items, others = [found[key] for key in keys], [former[key] for key in keys]
    else:
        if _pickled(before) != _pickled(now):
            yield now
        return
    if len(items) != len(others) or any(
        isinstance(one, _PLAIN) and (type(one) is not type(other) or one != other)
        for one, other in zip(items, others, strict=True)
    ):
        yield now
    for one, other in zip(items, others, strict=False):
        yield from _altered(other, one, seen)


def filled(value: Any, new: Any) -> bool:
    """Let a list, a dictionary, a set or an object hold what another one holds, as others may refer to it.

    What is in it and can hold something itself stays in its place, too.

    Returns:
        Whether it could be done.
    """
    if value is new or type(value) is not type(new) or isinstance(value, (*_PLAIN, Tensor, nn.Module)):
        return False
    if isinstance(value, (list, deque)):
        now = [old if filled(old, item) else item for old, item in zip_longest(value, new)][: len(new)]
        value.clear()
        value.extend(now)
    elif isinstance(value, set):
        value.clear()
        value.update(new)
    elif isinstance(value, dict) or has_content(value):
        _fill_mapping(value if isinstance(value, dict) else _attributes_of(value), new)
    else:
        return False
    return True


def _fill_mapping(mapping: MutableMapping[Any, Any], new: Any) -> None:
    items = new if isinstance(new, dict) else content_of(new)
    now = {key: mapping[key] if key in mapping and filled(mapping[key], item) else item for key, item in items.items()}
    for key in [*mapping]:
        del mapping[key]
    mapping.update(now)


def _attributes_of(value: Any) -> MutableMapping[str, Any]:
    return vars(value) if hasattr(value, "__dict__") else SlotItems(value)


def holder_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module keeps an attribute that is data, or would keep it."""
    return module._buffers if name in module._buffers else vars(module)


def can_hold(value: Any) -> bool:
    """Whether a value is a list, a dictionary or an object of the user's, which several may hold and change."""
    return is_state(value) and not isinstance(value, _PLAIN)


def has_content(value: Any) -> bool:
    """Whether a value is an object with attributes, or slots, of a class of the user's."""
    kind: Any = type(value)
    return not callable(value) and kind.__module__ != "builtins" and is_users(kind)


def content_of(value: Any) -> dict[str, Any]:
    """The attributes of an object."""
    return {**(vars(value) if hasattr(value, "__dict__") else {}), **SlotItems(value)}


def put(module: nn.Module, place: Place, data: bytes, *, stays: bool) -> Callable[[], None] | None:
    """Let a skipped module keep what it keeps where it runs.

    Args:
        module: the layer or outside module.
        place: where in it.
        data: the value, from `shown`.
        stays: whether it is expected to stay. A buffer is changed in place then, as on one device: code that has taken
            it before the call sees the change. Otherwise another tensor stands there for a time, since graphs of other
            micro-batches may need the values of the buffer.

    Returns:
        What puts back the former value; ``None`` if there is no such buffer on this rank.
    """
    path, name = place
    part, value = module.get_submodule(path), pickle.loads(data)
    if name not in part._buffers:
        return partial(_put_back, vars(part), name, _replace(vars(part), name, value))
    buffer = part._buffers[name]
    # the buffers of other ranks have no values here
    if type(buffer) is not Tensor or not isinstance(value, Tensor):
        return None
    if not stays or (buffer.shape, buffer.dtype) != (value.shape, value.dtype) or buffer.is_inference():
        return partial(_put_back, part._buffers, name, _replace(part._buffers, name, value.to(buffer.device)))
    with DisableTorchFunction(), torch.no_grad():
        former = buffer.clone()
        buffer.copy_(value)
    return partial(_copy_back, buffer, former)


def _copy_back(buffer: Tensor, former: Tensor) -> None:
    with DisableTorchFunction(), torch.no_grad():
        buffer.copy_(former)


def _replace(holder: dict[str, Any], name: str, value: Any) -> Any:
    before = holder.get(name, _MISSING)
    holder[name] = value
    return before


def _put_back(holder: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value


def _kept(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[Place, Any]]:
    for path, part in parts:
        kind: Any = type(part)
        if not is_own(kind):
            continue
        for name, value in vars(part).items():
            if is_data(name) and is_state(value):
                yield (path, name), value
        for name, buffer in part._buffers.items():
            if type(buffer) is Tensor:
                yield (path, name), buffer


def is_data(name: str) -> bool:
    """Whether an attribute of this name is neither a part of how a module is built nor one of its buffers."""
    return is_compared(name) and name not in ("forward", "_apply", "_buffers")


def is_state(value: Any) -> bool:
    """Whether a value is a number, a list, an object of the user's: something that a module may keep of its calls."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor | nn.Module | type) or callable(value):
        return False
    kind: Any = type(value)
    return isinstance(value, _CONTAINERS) or (is_users(kind) and (is_opaque(value) or hasattr(kind, "__slots__")))


@cache
def is_own(kind: type) -> bool:
    """Whether a class of modules is neither torch's, nor one of this package, nor a metric: it is known what they keep.

    Batch norms that defer their statistics keep some of every call, and cost a fifth more of a batch when looked into.
    """
    return not (str(kind.__module__).partition(".")[0] == "torch" or is_packages(kind) or is_metric(kind))


def is_packages(kind: type) -> bool:
    """Whether a class of modules is one of this package: deferred batch norms, skip connections."""
    return str(kind.__module__).partition(".")[0] == "lightning_pipe"


@cache
def is_metric(kind: type) -> bool:
    """Whether a class of modules is a metric of torchmetrics."""
    return any(str(base.__module__).partition(".")[0] == "torchmetrics" for base in kind.__mro__)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, Tensor | nn.Module):
            raise _NotAloneError


def _pickled(value: Any) -> bytes | None:
    """A value that refers to no tensors as bytes; ``None`` if it does, or does not pickle."""
    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:
        return None
    return file.getvalue()


def shown(value: Any) -> bytes | None:
    """A value for other ranks; ``None``: it is too large, requires a gradient, refers to tensors or does not pickle."""
    if isinstance(value, Tensor):
        if value.nbytes > _SHOWN or value.requires_grad:
            return None
        with DisableTorchFunction(), torch.no_grad():
            return pickle.dumps(value.detach().cpu().clone())
    found = _pickled(value)
    return found if found is not None and len(found) <= _SHOWN else None
