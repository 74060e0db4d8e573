"""What containers and objects of the user's classes hold, in a dictionary, in slots, or in both.

Objects of libraries are not looked into: they may be large and intricate.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

LARGE = 4096
"""What more is in containers of more elements is neither searched nor compared element by element."""
_LEAVES = (bool, int, float, complex, str, bytes, type(None), Tensor, type, ModuleType, np.ndarray, nn.Module)
_OF_PYTHON = (SimpleNamespace, Namespace, UserDict, UserList)
"""Classes of the standard library whose objects keep the user's values in attributes."""


def inside(value: Any) -> Any:
    """What a container or an object of the user's holds: a mapping, a sequence or a set; ``None`` for all else."""
    if isinstance(value, dict | list | tuple | deque | set | frozenset):
        return value
    if isinstance(value, slice | range):
        return value.start, value.stop, value.step
    return attributes_of(value) if is_object(value) else None


def values_in(value: Any) -> list[Any]:
    """The values that it holds, without keys and names, unless they are many."""
    held = inside(value)
    if held is None or len(held) > LARGE:
        return []
    return [*(held.values() if isinstance(held, Mapping) else held)]


def walk(value: Any, further: Callable[[Any], list[Any]]) -> Iterator[Any]:
    """A value and all that ``further`` leads to, but not from modules: each once, in the order of attributes."""
    pending, seen = [value], dict[int, Any]()  # which keeps them: no ``id`` comes again
    while pending:
        value = pending.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            yield value
            if not isinstance(value, _LEAVES):
                pending += reversed(further(value))


def is_object(value: Any) -> bool:
    """Whether a value is an object with attributes of the user's, and no module."""
    kind: Any = type(value)
    return kind in _OF_PYTHON or (is_users(kind) and not isinstance(value, Tensor | nn.Module | type))


def is_users(kind: Any) -> bool:
    """Whether a class, or a function, is the user's own rather than a library's, which may be large and intricate."""
    return _is_users(str(kind.__module__))


@cache
def _is_users(name: str) -> bool:
    if name == "__main__":
        return True
    if name.partition(".")[0] == __name__.partition(".")[0]:
        return False  # what this package puts into modules while it runs, wherever it is installed
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        found = importlib.util.find_spec(name) if module is None else None
        file = found.origin if found else None
    # A package installed with ``pip install -e`` lies outside these folders and counts as the user's.
    libraries = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return file is not None and not any(file.startswith(path) for path in libraries)


class SlotItems(UserDict[str, Any]):
    """The attributes of an object that has slots: what is put in or taken out here reaches the object."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        state: Any = object.__getstate__(owner)  # a dictionary, or that and what is in slots (Python 3.11)
        self.data = {}
        for each in state if isinstance(state, tuple) else (state,):
            self.data |= each or {}

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)
        del self.data[name]


def attributes_of(owner: Any) -> MutableMapping[str, Any]:
    """The attributes of an object."""
    kind: Any = type(owner)
    return SlotItems(owner) if _has_slots(kind) or not hasattr(owner, "__dict__") else vars(owner)


@cache
def _has_slots(kind: Any) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)
