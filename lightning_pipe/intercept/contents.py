"""What mutable objects hold at one time, with what is needed to find out and undo what became of it."""

from __future__ import annotations

from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Container, Iterator
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.slot_items import attributes_of
from lightning_pipe.intercept.tensor_state import copy_of, place_of, same_objects, same_values, version_of
from lightning_pipe.intercept.uncounted import check_counted
from lightning_pipe.intercept.user_classes import is_users

_LARGE = 4096
"""Containers of more elements are compared element by element only at their top level."""
_CLONED = 1 << 16
"""Tensors of up to this many elements are cloned, so that a change in place can be undone."""

Path = tuple[Any, ...]


class Change(NamedTuple):
    """One difference that a step made. A list or a set that has other elements is the same object, filled again.

    ``path`` starts with the name of a module; then come attributes and keys, each with the kind of its owner. What a
    call of a layer has changed is hidden from other ranks.
    """

    kind: Literal["set", "delete", "append", "fill", "hide"]
    path: Path
    value: Any = None


def attribute_of(change: Change) -> str:
    """The attribute, or the buffer, of its module that a change concerns."""
    _, (_, name), *inner = change.path
    return str(inner[0][1]) if name == "_buffers" and inner else str(name)


def owner_of(change: Change, module: nn.Module) -> Any:
    """The list, dictionary or object in a module that has changed; ``None``: an attribute has another value."""
    owner = at(module, change.path[1:] if change.kind == "fill" else change.path[1:-1])
    return None if owner is module or owner is module._buffers else owner


def at(owner: Any, steps: Path) -> Any:
    """What is at the end of the path that begins at an object."""
    for kind, key in steps:
        owner = items_of(owner, kind)[key]
    return owner


def items_of(owner: Any, kind: str) -> Any:
    """Where an object has what a step of a path leads to: in itself, or in its attributes."""
    return owner if kind == "item" else attributes_of(owner)


class _Kept(NamedTuple):
    """A value at the time of the capture, with what is needed to find out and undo what became of it."""

    value: Any
    node: Node | None


class Done(dict[int, Any]):
    """What stands in the place of each node that has been put back, or is being put back, by its ``id``."""

    def __init__(self, for_now: bool) -> None:
        super().__init__()
        self.for_now = for_now


class Node:
    """Something whose content can change: remembers the content."""

    owner: Any

    def undo(self, done: Done) -> Any:
        """Put the content back; returns the object to hold in the place of the present one."""
        raise NotImplementedError

    def undo_once(self, done: Done) -> Any:
        """Put the content back unless that is done, or under way: what it holds may hold it."""
        if id(self) not in done:
            done[id(self)] = self.owner
            done[id(self)] = self.undo(done)
        return done[id(self)]

    def changes(self, path: Path, seen: set[int]) -> Iterator[Change]:
        """The differences from the content remembered."""
        raise NotImplementedError

    def changes_once(self, path: Path, seen: set[int]) -> Iterator[Change]:
        """The differences, unless they have been reported under another path."""
        if id(self) not in seen:
            seen.add(id(self))
            yield from self.changes(path, seen)


class _Mapping(Node):
    """The items of a dictionary."""

    kind = "item"

    def __init__(self, owner: dict[Any, Any], seen: dict[int, Node]) -> None:
        seen[id(owner)] = self
        self.owner = owner
        # By now ``seen`` has this node: what the dictionary holds may hold the dictionary.
        items = dict(self.items())
        self.kept = {key: _keep(value, seen, len(items)) for key, value in items.items()}

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from self.owner.items()

    def put(self, key: Any, value: Any) -> None:
        self.owner[key] = value

    def remove(self, key: Any) -> None:
        del self.owner[key]

    def undo(self, done: Done) -> Any:
        now = dict(self.items())
        # The order of keys is not put back: a key that was deleted comes last.
        for key in now.keys() - self.kept.keys():
            self.remove(key)
        for key, (value, node) in self.kept.items():
            before = value if node is None else node.undo_once(done)
            if key not in now or now[key] is not before:
                self.put(key, before)
        return self.owner

    def changes(self, path: Path, seen: set[int]) -> Iterator[Change]:
        now = dict(self.items())
        for key in self.kept.keys() - now.keys():
            yield Change("delete", (*path, (self.kind, key)))
        for key, value in now.items():
            kept = self.kept.get(key)
            here = (*path, (self.kind, key))
            if kept is None or (kept.value is not value and not _equal_plain(kept.value, value)):
                yield Change("set", here, value)
            elif kept.node is not None:
                yield from kept.node.changes_once(here, seen)


class Attributes(_Mapping):
    """The attributes of a module or another object."""

    kind = "attribute"
    only: Container[str] | None

    def __init__(self, owner: Any, seen: dict[int, Node], skipped: frozenset[str] = frozenset()) -> None:
        self.skipped, self.only = skipped, None
        super().__init__(owner, seen)

    @override
    def items(self) -> Iterator[tuple[Any, Any]]:
        only, skipped = self.only, self.skipped
        for name, value in attributes_of(self.owner).items():
            if name not in skipped and (only is None or name in only) and not isinstance(value, nn.Module):
                yield name, value

    @override
    def put(self, key: Any, value: Any) -> None:
        attributes_of(self.owner)[key] = value

    @override
    def remove(self, key: Any) -> None:
        del attributes_of(self.owner)[key]


class _List(Node):
    """The elements of a list or a deque."""

    def __init__(self, owner: Any, seen: dict[int, Node]) -> None:
        seen[id(owner)] = self
        self.owner = owner
        self.kept = [_keep(value, seen, len(owner)) for value in owner]

    def undo(self, done: Done) -> Any:
        before = [value if node is None else node.undo_once(done) for value, node in self.kept]
        if not same_objects(before, self.owner):
            self.owner.clear()
            self.owner.extend(before)
        return self.owner

    def changes(self, path: Path, seen: set[int]) -> Iterator[Change]:
        now = list(self.owner)
        old = len(self.kept)
        if not same_objects(now[:old], [kept.value for kept in self.kept]):
            yield Change("fill", path, self.owner)
            return
        for index, (_, node) in enumerate(self.kept):
            if node is not None:
                yield from node.changes_once((*path, ("item", index)), seen)
        if len(now) > old:
            # Told apart from other changes: two ranks with the last stage append what their own micro-batches brought.
            yield Change("append", (*path, ("item", None)), now[old:])


class _Tuple(Node):
    """What is in a tuple, which stays the same object as long as nothing in it has to be replaced."""

    def __init__(self, owner: tuple[Any, ...], seen: dict[int, Node]) -> None:
        seen[id(owner)] = self
        self.owner = owner
        self.kept = [_keep(value, seen, len(owner)) for value in owner] if len(owner) <= _LARGE else []

    def undo(self, done: Done) -> Any:
        before = [value if node is None else node.undo_once(done) for value, node in self.kept]
        if not self.kept or same_objects(before, self.owner):
            return self.owner
        kind: Any = type(self.owner)
        return kind._make(before) if hasattr(kind, "_make") else kind(before)

    def changes(self, path: Path, seen: set[int]) -> Iterator[Change]:
        for index, (_, node) in enumerate(self.kept):
            here = (*path, ("item", index))
            for change in () if node is None else node.changes_once(here, seen):
                # a tensor or an array that has changed: other ranks get another tuple with it
                yield Change("set", path, self.owner) if change.path == here and change.kind == "set" else change


class _Set(Node):
    """The elements of a set."""

    def __init__(self, owner: set[Any], seen: dict[int, Node]) -> None:
        seen[id(owner)] = self
        self.owner, self.kept = owner, set(owner)

    def undo(self, done: Done) -> Any:
        if self.owner != self.kept:
            self.owner.clear()
            self.owner.update(self.kept)
        return self.owner

    def changes(self, path: Path, seen: set[int]) -> Iterator[Change]:
        if self.owner != self.kept:
            yield Change("fill", path, self.owner)


class _Tensor(Node):
    """The value of a tensor or array that may be changed in place."""

    def __init__(self, owner: Any, seen: dict[int, Node]) -> None:
        seen[id(owner)] = self
        self.owner, self.kind = owner, type(owner)
        small = (owner.numel() if isinstance(owner, Tensor) else owner.size) <= _CLONED
        self.kept = copy_of(owner) if small else None  # a large one costs memory: its change cannot be undone
        self.version, self.place = version_of(owner), place_of(owner)

    def _changed(self) -> bool:
        if type(self.owner) is not self.kind or version_of(self.owner) != self.version:
            return True
        if place_of(self.owner) != self.place:  # swapped for another tensor, with all who refer to it
            return True
        return self.version is None and self.kept is not None and not same_values(self.owner, self.kept)

    def undo(self, done: Done) -> Any:
        if not self._changed():
            return self.owner
        if done.for_now and self.kept is not None:
            return self.kept
        if self.kept is None:
            raise CutError(
                f"A tensor of shape {tuple(self.owner.shape)} that belongs to the LightningModule was changed in place "
                "by a run of the step that ends at a cut.",
                hint="Change it after the last layer, or outside the step.",
            )
        # a tensor that the cut has swapped for another cannot take its value back
        if type(self.owner) is not self.kind or place_of(self.owner) != self.place:
            return self.kept
        if self.kind is Tensor:
            check_counted([self.owner])
        with torch.no_grad():
            # in place, for whoever else refers to the tensor or to a view of it
            self.owner[...] = self.kept
        return self.owner

    def changes(self, path: Path, seen: set[int]) -> Iterator[Change]:
        # it may have been filled with the values that it had
        if self._changed() and (self.kept is None or not same_values(self.owner, self.kept)):
            yield Change("set", path, self.owner)


def _keep(value: Any, seen: dict[int, Node], siblings: int) -> _Kept:
    return _Kept(value, _node(value, seen) if siblings <= _LARGE else None)


def _node(value: Any, seen: dict[int, Node]) -> Node | None:
    """What remembers the content of a value; ``None`` if it has none that a step could change."""
    kind: Any = type(value)
    if kind in (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size, frozenset):
        return None
    if id(value) in seen:
        # a module that another one refers to counts where it is a part, or not at all
        return None if isinstance(value, nn.Module) else seen[id(value)]
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else _Tensor(value, seen)
    for kinds, node in _NODES:
        if isinstance(value, kinds):
            found: Node = node(value, seen)
            return found
    if kind in _OF_PYTHON or (is_users(kind) and not isinstance(value, type | nn.Module)):
        return Attributes(value, seen)
    return None


_NODES: tuple[tuple[Any, type[Any]], ...] = (
    (dict, _Mapping),
    ((list, deque), _List),
    (tuple, _Tuple),
    (set, _Set),
    (np.ndarray, _Tensor),
)
_OF_PYTHON = (SimpleNamespace, Namespace, UserDict, UserList)
"""Classes of the standard library whose objects keep the user's values in attributes."""


def _equal_plain(one: Any, other: Any) -> bool:
    """Equal without being the same object: numbers and strings alone."""
    return type(one) is type(other) and isinstance(one, int | float | str | bytes) and one == other
