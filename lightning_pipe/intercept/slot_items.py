"""The attributes of objects that have slots in the place of a dictionary."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any


class SlotItems(MutableMapping[str, Any]):
    """The attributes of an object that keeps them in slots, as a mapping."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        if not hasattr(self._owner, name):
            raise KeyError(name)
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        slots = (getattr(kind, "__slots__", ()) for kind in type(self._owner).__mro__)
        names = (name for each in slots for name in ((each,) if isinstance(each, str) else each))
        return (name for name in names if name[:2] != "__" and hasattr(self._owner, name))  # __weakref__ is one, too

    def __len__(self) -> int:
        return sum(1 for _ in self)


def attributes_of(owner: Any) -> MutableMapping[str, Any]:
    """The attributes that an object keeps in a dictionary, or else in slots."""
    return vars(owner) if hasattr(owner, "__dict__") else SlotItems(owner)
