"""What became of the attributes of modules, and the way back."""

from __future__ import annotations

from argparse import Namespace
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.snapshot import Snapshot


@dataclass(slots=True)
class Slots:
    """Keeps its attributes in no dictionary."""

    number: int = 1
    items: list[int] = field(default_factory=lambda: [1])


@dataclass
class Counter:
    """An object that can be called."""

    number: int = 1

    def __call__(self) -> int:
        return self.number


class Pair(NamedTuple):
    numbers: list[int]
    array: np.ndarray


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.text, self.items, self.table = 1, "a", [1, [2]], {"k": [1]}
        self.names, self.array, self.tensor = {"x"}, np.ones(2), torch.ones(2)
        self.slots, self.space = Slots(), SimpleNamespace(number=1)
        self.counter, self.pair, self.options = Counter(), Pair([1], np.ones(2)), Namespace(scale=1.0)
        self.both, self.user = ([1], [{"k": 1}]), UserDict(k=1)
        self.register_buffer("mean", torch.zeros(2))


def content(module: nn.Module) -> str:
    slots = module.slots
    return repr(
        (sorted({**vars(module), "slots": None}.items()), [getattr(slots, name, None) for name in ("number", "items")])
    )


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, value)


CHANGES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("set", "number", _set("number", 2)),
    ("set", "new", _set("new", [1])),
    ("delete", "text", lambda module: delattr(module, "text")),
    ("append", "items", lambda module: module.items.append(3)),
    ("append", "items", lambda module: module.items[1].append(3)),
    ("fill", "items", lambda module: module.items.insert(0, 3)),
    ("append", "table", lambda module: module.table["k"].append(3)),
    ("delete", "table", lambda module: module.table.clear()),
    ("fill", "names", lambda module: module.names.add("y")),
    ("set", "array", lambda module: module.array.__iadd__(1)),
    ("set", "tensor", lambda module: module.tensor.add_(1)),
    ("set", "slots", lambda module: setattr(module.slots, "number", 2)),
    ("append", "slots", lambda module: module.slots.items.append(2)),
    ("delete", "slots", lambda module: delattr(module.slots, "number")),
    ("set", "space", lambda module: setattr(module.space, "number", 2)),
    ("set", "counter", lambda module: setattr(module.counter, "number", 2)),
    ("append", "pair", lambda module: module.pair.numbers.append(2)),
    ("set", "pair", lambda module: module.pair.array.__iadd__(1)),
    ("append", "both", lambda module: module.both[0].append(2)),
    ("set", "both", lambda module: module.both[1][0].update(k=2)),
    ("set", "options", lambda module: setattr(module.options, "scale", 2.0)),
    ("set", "user", lambda module: module.user.update(k=2)),
    ("set", "_buffers", lambda module: module.mean.add_(1)),
]


@pytest.mark.parametrize(("kind", "name", "change"), CHANGES)
def test_a_change_is_found_and_undone(kind: str, name: str, change: Callable[[Any], Any]) -> None:
    module = Holder()
    before, content_before = Snapshot({"part": module}), content(module)
    assert before.changes() == []
    change(module)
    (found,) = before.changes()
    assert (found.kind, found.path[:2]) == (kind, ("part", name))
    assert content(module) != content_before
    before.undo()
    assert content(module) == content_before


def test_what_a_tuple_holds_may_come_back_as_another_tensor() -> None:
    module = Holder()
    module.pair = Pair([1], torch.ones(2))  # type: ignore[arg-type]
    before = Snapshot({"part": module})
    torch.utils.swap_tensors(module.pair.array, torch.zeros(3))  # type: ignore[arg-type]
    (found,) = before.changes()
    assert (found.kind, found.path, found.value) == ("set", ("part", "pair"), module.pair)
    before.undo()
    assert isinstance(module.pair, Pair)
    assert module.pair.array.tolist() == [1, 1]


def test_a_tensor_that_gets_the_memory_that_another_has_given_up_is_another_one() -> None:
    module, memory = Holder(), np.ones(2)
    module.tensor = torch.from_numpy(memory)
    before = Snapshot({"": module})
    memory += 4
    other = torch.from_numpy(memory)
    assert (other.data_ptr(), other._version) == (module.tensor.data_ptr(), module.tensor._version)
    torch.utils.swap_tensors(module.tensor, other)  # type: ignore[no-untyped-call]
    assert [change.value.tolist() for change in before.changes()] == [[5, 5]]
    before.undo()
    assert module.tensor.tolist() == [1, 1]


def test_what_is_filled_with_the_same_values_has_not_changed() -> None:
    module = Holder()
    before = Snapshot({"": module})
    module.tensor.copy_(module.tensor.clone())
    assert before.changes() == []


def test_containers_that_hold_themselves_end() -> None:
    module = Holder()
    module.table["self"] = module.table
    before = Snapshot({"": module})
    module.table["more"] = 1
    assert len(before.changes()) == 1
    before.undo()
    assert set(module.table) == {"k", "self"}


def test_what_two_names_share_is_put_back_for_both() -> None:
    module = Holder()
    module.alias = module.items
    before = Snapshot({"": module})
    module.items.append(3)
    module.alias = None
    before.undo()
    assert module.alias is module.items
    assert module.items == [1, [2]]


def test_what_has_changed_in_place_is_told_whatever_stands_there_now() -> None:
    module = Holder()
    before = Snapshot({"part": module})
    module.number, module.items = 2, [*module.items, 3]
    assert [*before.altered()] == [(("part", "number"), True, []), (("part", "items"), True, [])]
    before = Snapshot({"part": module})
    items = module.items
    items.append(4)
    module.mean.add_(1)
    module.items, module.new = [], 1
    assert [*before.altered()] == [
        (("part", "items"), True, [items]),
        (("part", "new"), False, []),
        (("part", "mean"), True, [module.mean]),
    ]


def test_a_large_tensor_cannot_be_put_back() -> None:
    module = Holder()
    module.tensor = torch.zeros(1 << 17)
    before = Snapshot({"": module})
    module.tensor.add_(1)
    with pytest.raises(CutError, match="changed in place"):
        before.undo()
