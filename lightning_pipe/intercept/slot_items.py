"""The attributes of an object, wherever it keeps them: in a dictionary, in slots, or in both."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cache
from typing import Any


class SlotItems(MutableMapping[str, Any]):
    """The attributes of an object that has slots, as a mapping."""

    def __init__(self, owner: Any) -> None:
        kind: Any = type(owner)
        self._owner, self._slots = owner, _slots(kind)
        self._others: dict[str, Any] = getattr(owner, "__dict__", {})

    def __getitem__(self, name: str) -> Any:
        if name in self._slots and hasattr(self._owner, name):
            return getattr(self._owner, name)
        return self._others[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            object.__setattr__(self._owner, name, value)
        else:
            self._others[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            object.__delattr__(self._owner, name)
        else:
            del self._others[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from (name for name in self._slots if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def attributes_of(owner: Any) -> MutableMapping[str, Any]:
    """The attributes of an object."""
    kind: Any = type(owner)
    return SlotItems(owner) if _slots(kind) or not hasattr(owner, "__dict__") else vars(owner)


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    found = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = (name for each in found for name in ((each,) if isinstance(each, str) else each))
    return tuple(dict.fromkeys(name for name in names if name[:2] != "__"))  # __weakref__ is one, too
