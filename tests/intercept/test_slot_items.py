"""The attributes of an object with slots, as a mapping; with a dictionary, too, they are one."""

from __future__ import annotations

import pytest

from lightning_pipe.intercept.slot_items import SlotItems, attributes_of


class Named:
    __slots__ = "name"

    def __init__(self) -> None:
        self.name = "x"


class Numbered(Named):
    __slots__ = ("missing", "number")

    def __init__(self) -> None:
        super().__init__()
        self.number = 1


class Open(Named):
    """Has a dictionary besides."""


def test_slots_and_others_are_attributes_alike() -> None:
    thing = Open()
    thing.count = 1
    attributes = attributes_of(thing)
    assert dict(attributes) == {"count": 1, "name": "x"}
    attributes.update(name="y", count=2, late=3)
    assert (thing.name, thing.count, thing.late) == ("y", 2, 3)
    attributes.clear()
    assert vars(thing) == {}
    assert not hasattr(thing, "name")


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
