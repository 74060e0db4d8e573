"""What modules and mutable objects hold at one time: what became of it since, and the way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.tensor_state import copy_of, place_of, same_values, version_of
from lightning_pipe.intercept.user_objects import LARGE, attributes_of, is_object
from lightning_pipe.torch_internals import DisableTorchFunction

# Parameters and submodules are not looked at: a step leaves them as they are. Buffers change in forward passes.
# A snapshot that lives as long as a batch must not keep weak references to parameters: those could not be swapped then.
_MODULE_INTERNALS = (frozenset(vars(nn.Module())) - {"_buffers"}) | {"_flat_weight_refs"}
# What the Trainer sets in a LightningModule by itself, around hooks too: none of it is a change by the step.
_SKIPPED = _MODULE_INTERNALS | {"_trainer", "_current_fx_name", "_metric_attributes"}
_PLAIN = {int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size, frozenset}  # cannot change
_CLONED = 1 << 16
"""Tensors of up to this many elements are cloned, so that a change in place can be undone."""

MISSING = object()
"""Stands for what is not there."""
Path = tuple[Any, ...]


class Change(NamedTuple):
    """One difference that a step made. A list or a set that has other elements is the same object, filled again.

    ``path`` starts with the name of a module; then come attributes and keys. What a call of a layer has changed is
    hidden from other ranks.
    """

    kind: Literal["set", "delete", "append", "fill", "hide"]
    path: Path
    value: Any = None

    @property
    def written(self) -> str:
        """What has changed, as code writes it; keys in the place of brackets."""
        return ".".join(["self", *(str(key) for key in self.path if key not in (None, "", "_buffers"))])


def items_of(owner: Any) -> Any:
    """Where an object has what a step of a path leads to: in itself, or in its attributes."""
    return owner if isinstance(owner, dict | list | deque | tuple | set) else attributes_of(owner)


def refill(container: Any, content: Any) -> None:
    """Let a dictionary, list, deque or set, the same object, hold what another one does."""
    container.clear()
    container.update(content) if isinstance(container, dict | set) else container.extend(content)


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def hook_dictionaries(modules: Iterable[nn.Module]) -> list[dict[Any, Any]]:
    """What holds the hooks of modules: the same objects as long as these live."""
    return [held for part in modules for name, held in vars(part).items() if name.startswith(_HOOKS)]


def hooks_of(dictionaries: Sequence[dict[Any, Any]]) -> Callable[[], None]:
    """Lets dictionaries hold again the hooks that are in them now."""
    hooks = {place: dict(held) for place, held in enumerate(dictionaries) if held}  # mostly few

    def put_back() -> None:
        for place, held in enumerate(dictionaries):
            if (held or place in hooks) and held.keys() != hooks.get(place, {}).keys():
                refill(held, hooks.get(place, {}))

    return put_back


Found = tuple[Any, Change]
"""A difference, and the list, dictionary, object or other thing in which it is."""


class Node:
    """Something whose content can change, a dictionary if nothing else is said: remembers the content.

    Args:
        owner: what has the content.
        seen: the nodes so far, by the ``id`` of their owners.

    Attributes:
        kept, nodes: by key the values, and what remembers the content of those in which anything can change.
    """

    def __init__(self, owner: Any, seen: dict[int, Node]) -> None:
        seen[id(owner)] = self  # first: what it holds may hold it
        self.owner, self.nodes = owner, dict[Any, Node]()
        self.kept = self.items()
        if len(self.kept) <= LARGE:
            for key, value in self.kept.items():
                if type(value) not in _PLAIN and (node := _node(value, seen)) is not None:
                    self.nodes[key] = node

    def items(self) -> dict[Any, Any]:
        """The present content."""
        return dict(self.owner)

    def undo(self, done: dict[Node, Any], for_now: bool) -> Any:
        """Put the content back; see `Snapshot.undo`.

        Args:
            done: by the nodes for which that is done, or under way, what stands in the place of their owners.
            for_now: whether copies may stand for tensors.

        Returns:
            What to hold in the place of the owner.
        """
        if self not in done:
            done[self] = self.owner  # what it holds may hold it
            done[self] = self._undo(done, for_now)
        return done[self]

    def _undo(self, done: dict[Node, Any], for_now: bool) -> Any:
        if not (self.kept or self.items()):  # as mostly
            return self.owner
        before = self.kept | {key: node.undo(done, for_now) for key, node in self.nodes.items()}
        now = self.items()
        same = before.keys() == now.keys() and all(map(is_, before.values(), map(now.get, before)))
        return self.owner if same else self._filled(before, now)

    def _filled(self, before: dict[Any, Any], now: dict[Any, Any]) -> Any:
        """Let the owner hold what it held; returns the owner, or what is to stand in its place."""
        target = items_of(self.owner)
        # The order of keys is not put back: a key that was deleted comes last.
        for key in now.keys() - before.keys():
            del target[key]
        for key, value in before.items():
            if key not in now or now[key] is not value:
                target[key] = value
        return self.owner

    def changes(self, path: Path, seen: set[Node]) -> Iterator[Found]:
        """The differences from the content remembered, unless they have been reported under another path."""
        if self not in seen:
            seen.add(self)
            yield from self._changes(path, seen)

    def _changes(self, path: Path, seen: set[Node]) -> Iterator[Found]:
        kept, now = self.kept, self.items()
        for key in kept:
            if key not in now:
                yield self.owner, Change("delete", (*path, key))
        for key, value in now.items():
            if key not in kept or not (kept[key] is value or equal_plain(kept[key], value)):
                yield self.owner, Change("set", (*path, key), value)
            elif key in self.nodes:
                yield from self.nodes[key].changes((*path, key), seen)


class Attributes(Node):
    """The attributes of a module or another object."""

    only: Container[str] | None

    def __init__(self, owner: Any, seen: dict[int, Node], skipped: frozenset[str] = frozenset()) -> None:
        self.skipped, self.only = skipped, None
        super().__init__(owner, seen)

    @override
    def items(self) -> dict[Any, Any]:
        only, skipped = self.only, self.skipped
        return {
            name: value
            for name, value in attributes_of(self.owner).items()
            if name not in skipped and (only is None or name in only)
            if type(value) in _PLAIN or type(value) in _NODES or not isinstance(value, nn.Module)
        }


class _List(Node):
    """The elements of a list or a deque."""

    @override
    def items(self) -> dict[Any, Any]:
        return dict(enumerate(self.owner))

    @override
    def _filled(self, before: dict[Any, Any], now: dict[Any, Any]) -> Any:
        refill(self.owner, before if isinstance(self.owner, set) else before.values())
        return self.owner

    @override
    def _changes(self, path: Path, seen: set[Node]) -> Iterator[Found]:
        now, old = list(self.owner), len(self.kept)
        if len(now) < old or not all(map(is_, now, self.kept.values())):
            yield self.owner, Change("fill", path, self.owner)
            return
        for index, node in self.nodes.items():
            yield from node.changes((*path, index), seen)
        if len(now) > old:
            # Told apart from other changes: a list that grows all the time is not sent whole.
            yield self.owner, Change("append", (*path, None), now[old:])


class _Tuple(_List):
    """What is in a tuple, which stays the same object as long as nothing in it has to be replaced."""

    @override
    def _filled(self, before: dict[Any, Any], now: dict[Any, Any]) -> Any:
        kind: Any = type(self.owner)
        return kind._make(before.values()) if hasattr(kind, "_make") else kind(before.values())

    @override
    def _changes(self, path: Path, seen: set[Node]) -> Iterator[Found]:
        for owner, change in super()._changes(path, seen):
            # a tensor or an array that has changed: other ranks get another tuple with it
            inner = change.kind == "set" and change.path[:-1] == path
            yield owner, Change("set", path, self.owner) if inner else change


class _Set(_List):
    """The elements of a set."""

    @override
    def items(self) -> dict[Any, Any]:
        return dict.fromkeys(self.owner)

    @override
    def _changes(self, path: Path, seen: set[Node]) -> Iterator[Found]:
        if self.owner != self.kept.keys():
            yield self.owner, Change("fill", path, self.owner)


class _Tensor(Node):
    """The value of a tensor or array that may be changed in place."""

    def __init__(self, owner: Any, seen: dict[int, Node]) -> None:
        seen[id(owner)] = self
        self.owner = owner
        small = (owner.numel() if isinstance(owner, Tensor) else owner.size) <= _CLONED
        self.former = copy_of(owner) if small else None  # a large one costs memory: its change cannot be undone
        self.version, self.place = version_of(owner), place_of(owner)
        self.marks = dict(vars(owner)) if isinstance(owner, Tensor) else {}  # what it went through in a run

    def _changed(self) -> bool:
        # at another place: swapped for another tensor, with all who refer to it
        if version_of(self.owner) != self.version or place_of(self.owner) != self.place:
            return True
        return self.version is None and self.former is not None and not same_values(self.owner, self.former)

    @override
    def _undo(self, done: dict[Node, Any], for_now: bool) -> Any:
        if not self._changed():
            return self.owner
        if self.former is None:
            raise CutError(
                f"A tensor of shape {tuple(self.owner.shape)} that belongs to the LightningModule was changed in place "
                "by a run of the step that ends at a cut.",
                hint="Change it after the last layer, or outside the step.",
            )
        # a tensor that the cut has swapped for another cannot take its value back
        if for_now or place_of(self.owner) != self.place:
            return self.former
        with torch.no_grad():
            # in place, for whoever else refers to the tensor or to a view of it
            self.owner[...] = self.former
        if isinstance(self.owner, Tensor):
            refill(vars(self.owner), self.marks)
        return self.owner

    @override
    def _changes(self, path: Path, seen: set[Node]) -> Iterator[Found]:
        # it may have been filled with the values that it had
        if self._changed() and (self.former is None or not same_values(self.owner, self.former)):
            yield self.owner, Change("set", path, self.owner)


def _node(value: Any, seen: dict[int, Node]) -> Node | None:
    """What remembers the content of a value; ``None`` if it has none that a step could change."""
    if id(value) in seen:
        # a module that another one refers to counts where it is a part, or not at all
        return None if isinstance(value, nn.Module) else seen[id(value)]
    if type(value) in _NODES:
        return _NODES[type(value)](value, seen)
    for kind, node in _NODES.items():
        if isinstance(value, kind):
            return node(value, seen)
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else _Tensor(value, seen)
    return Attributes(value, seen) if is_object(value) else None


_NODES: dict[Any, type[Node]] = {dict: Node, list: _List, deque: _List, tuple: _Tuple, set: _Set, np.ndarray: _Tensor}


def equal_plain(one: Any, other: Any) -> bool:
    """Equal without being the same object: numbers and strings alone."""
    return type(one) is type(other) and isinstance(one, int | float | str | bytes) and one == other


def is_compared(name: str) -> bool:
    """Whether snapshots compare attributes of this name."""
    return name not in _SKIPPED


class Snapshot:
    """The attributes of some modules at one time.

    Args:
        modules: the modules by name.
        buffers: whether buffers count.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, buffers: bool = True) -> None:
        skipped = _SKIPPED if buffers else _SKIPPED | {"_buffers"}
        # Nodes keep their objects, so no ``id`` comes to mean another object while the snapshot lives.
        seen: dict[int, Node] = {}  # one node for each object: several may refer to it, and it may hold itself
        with DisableTorchFunction():  # a step under way must not take this for calls of its own
            self._nodes = {name: Attributes(module, seen, skipped) for name, module in modules.items()}

    def undo(self, *, for_now: bool = False) -> None:
        """Put everything back in place.

        Args:
            for_now: let copies stand for tensors that have changed in place: another snapshot puts the tensors back,
                and their values may be needed by graphs meanwhile.
        """
        with DisableTorchFunction():
            done: dict[Node, Any] = {}
            for node in self._nodes.values():
                node.undo(done, for_now)

    def narrow(self) -> bool:
        """Count from now on what has become different so far, and nothing else; whether anything has."""
        found: dict[str, set[str]] = {}
        for change in self.changes():
            found.setdefault(change.path[0], set()).add(change.path[1])
        self._nodes = {name: self._nodes[name] for name in found}
        for name, node in self._nodes.items():
            names = node.only = found[name]
            node.kept = {key: node.kept[key] for key in node.kept.keys() & names}
            node.nodes = {key: node.nodes[key] for key in node.nodes.keys() & names}
        return bool(found)

    def altered(self) -> list[tuple[tuple[str, str], bool, list[Any]]]:
        """The modules' names and attributes or buffers that have another value, or one in which something has changed.

        With each, whether it had a value before, and what has changed in place, whatever is there now.
        """
        found = list[tuple[tuple[str, str], bool, list[Any]]]()
        with DisableTorchFunction():
            for name, node in self._nodes.items():
                for holder in filter(None, (node, node.nodes.get("_buffers"))):
                    now = holder.items()
                    for key in (each for each in holder.kept | now if each != "_buffers"):
                        former, value = holder.kept.get(key, MISSING), now.get(key, MISSING)
                        inner = holder.nodes[key].changes((), set()) if key in holder.nodes else ()
                        owners = [owner for owner, _ in inner]
                        if owners or not (value is former or equal_plain(value, former)):
                            found.append(((name, key), former is not MISSING, owners))
        return found

    def changes(self) -> list[Change]:
        """What has become different since."""
        with DisableTorchFunction():
            seen: set[Node] = set()
            return [change for name, node in self._nodes.items() for _, change in node.changes((name,), seen)]
