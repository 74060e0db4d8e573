"""Objects that a call changes: which ones, how they are described, and how another rank's object gets there."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.effects import Watch
from lightning_pipe.intercept.objects import objects_of, put_state


class Memory:
    """What a layer may keep between calls."""

    def __init__(self) -> None:
        self.length = 0
        self.rows: list[Tensor] = []
        self.inner: Any = None


class Watched(Watch):
    """The call of a layer that is given some objects; other ranks can be shown what changes in them, or cannot."""

    def __init__(self, *given: Any) -> None:
        super().__init__("layer", nn.Module(), (), given)

    def changes(self) -> list[tuple[Any, Any, list[Tensor]]]:
        tracker: Any = SimpleNamespace(shows_objects=True)
        return [(effect.where, effect.state, left) for effect, left in self.effects(tracker)]

    def check_unchanged(self, come_back: Any = None) -> None:
        tracker: Any = SimpleNamespace(shows_objects=False, come_back=come_back)
        assert list(self.effects(tracker)) == []


class Named(dict[str, Any]):
    """A dictionary with attributes."""


def test_objects_are_found_once_wherever_they_are() -> None:
    memory, inner = Memory(), Memory()
    memory.inner = {"again": [inner, memory], "module": math}
    round_trip: list[Any] = [memory]
    round_trip.append(round_trip)
    assert objects_of([1, round_trip, torch.ones(1), inner]) == [memory, inner]


@pytest.mark.parametrize("replaced", [True, False])
def test_what_changes_is_described_with_its_tensors(replaced: bool) -> None:
    memory, rows = Memory(), torch.ones(2)
    memory.rows.append(rows)
    states = Watched(memory)
    assert states.changes() == []
    states.check_unchanged()
    if replaced:
        memory.rows[0] = rows + 1
    else:
        rows.add_(1)
    memory.length = 3
    [(number, state, tensors)] = states.changes()
    assert number == 0
    assert tensors[0] is memory.rows[0]
    other = Memory()
    kept = other.rows
    put_state(other, state, ["stands for the tensor"], [other])
    assert other.length == 3
    assert other.rows is kept == ["stands for the tensor"]
    with pytest.raises(CutError, match="'layer' changes its argument of type Memory"):
        states.check_unchanged()
    with pytest.raises(KeyError, match="layer"):  # a step that may have several passes ends in a way of its own
        states.check_unchanged({}.__getitem__)


class Graph(Memory):
    """An object that can be called, as batches of graphs can: that says nothing of what it holds."""

    def __call__(self) -> list[Tensor]:
        return self.rows


def test_objects_that_can_be_called_are_objects() -> None:
    graph = Graph()
    given = graph, len, math.sqrt, graph.__call__, test_an_equal_number_is_no_change
    states = Watched(*given)
    assert objects_of(given) == [graph]
    graph.rows.append(torch.ones(2))
    with pytest.raises(CutError, match="'layer' changes its argument of type Graph"):
        states.check_unchanged()


def test_an_equal_number_is_no_change() -> None:
    memory = Memory()
    memory.length = 10**6
    states = Watched(memory)
    memory.length = int("1000000")
    states.check_unchanged()


def test_a_kind_of_dictionary_cannot_be_described() -> None:
    cache = Named(length=1)
    states = Watched(cache)
    assert states.changes() == []
    cache["length"] = 2
    with pytest.raises(CutError, match="'layer' changes its argument of type Named"):
        states.changes()


def test_what_cannot_be_pickled_raises() -> None:
    memory = Memory()
    states = Watched(memory)
    memory.inner = lambda: None
    with pytest.raises(CutError, match="'layer' changes its argument of type Memory"):
        states.changes()
