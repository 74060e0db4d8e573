"""The attributes of an object with slots, as a mapping."""

from __future__ import annotations

import pytest

from lightning_pipe.intercept.slot_items import SlotItems


class Named:
    __slots__ = "name"

    def __init__(self) -> None:
        self.name = "x"


class Numbered(Named):
    __slots__ = ("missing", "number")

    def __init__(self) -> None:
        super().__init__()
        self.number = 1


def test_slots_of_all_classes_are_items() -> None:
    thing = Numbered()
    items = SlotItems(thing)
    assert dict(items) == {"number": 1, "name": "x"}
    assert len(items) == 2
    items["missing"] = 2
    assert thing.missing == 2
    del items["number"]
    assert not hasattr(thing, "number")
    with pytest.raises(KeyError):
        items["number"]
