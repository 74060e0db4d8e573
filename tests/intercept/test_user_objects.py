"""What objects of the user's hold; which those are, and their attributes with slots and without."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_pipe.intercept.stage_run import StageRun
from lightning_pipe.intercept.user_objects import SlotItems, attributes_of, inside, is_users, values_in


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


def test_classes_of_libraries_are_not_the_users() -> None:
    assert not any(map(is_users, (int, OrderedDict, torch.Tensor)))
    assert is_users(type("Own", (), {"__module__": __name__}))
    assert is_users(type("Script", (), {"__module__": "__main__"}))


def test_what_this_package_puts_into_modules_is_not_the_users() -> None:
    assert not is_users(StageRun)


class Callable(Open):
    def __call__(self) -> None: ...


def test_containers_and_objects_of_the_users_hold_something() -> None:
    thing = Callable()
    assert inside(thing) == {"name": "x"}
    assert inside(SimpleNamespace(a=1)) == {"a": 1}
    assert values_in({"a": [1], "b": 2}) == [[1], 2]
    assert (values_in(slice(1, 2)), values_in(range(3))) == ([1, 2, None], [0, 3, 1])
    assert [inside(each) for each in (print, thing.__call__, Open, nn.Identity(), torch.ones(1))] == [None] * 5
