"""What batches are made of: contents, copies, and what tells their shapes."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_pipe.engine.containers import children, fresh, map_leaves, signature
from lightning_pipe.errors import CutError


@dataclass
class Sample:
    x: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Derived:
    """Says of its length what its constructor is not given, and doubles what it is given."""

    x: Tensor
    scale: InitVar[float]
    mask: Tensor = field(init=False)
    later: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        object.__setattr__(self, "x", self.x * scale)
        object.__setattr__(self, "mask", self.x > 0)
        object.__setattr__(self, "squares", self.x**2)


class Typed(namedtuple("Typed", "x y")):
    """Its constructor takes one argument."""

    def __new__(cls, x: Tensor) -> Typed:
        return super().__new__(cls, x, x)


class Held(MutableMapping[str, Any]):
    """Keeps its items in a dictionary, which a shallow copy shares."""

    def __init__(self, **items: Any) -> None:
        self.items_held = items

    def __getitem__(self, key: str) -> Any:
        return self.items_held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_held)

    def __len__(self) -> int:
        return len(self.items_held)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2)},
        UserDict({"x": torch.ones(2)}),
        [torch.ones(2)],
        (torch.ones(2), 1),
        Pair(torch.ones(2), torch.ones(2)),
        Sample(torch.ones(2)),
        Derived(torch.ones(2), 1.0),
        Typed(torch.ones(2)),
        Held(x=torch.ones(2)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_container_keeps_its_kind(batch: Any) -> None:
    again = map_leaves(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, batch)
    before = children(batch)
    assert before is not None
    assert next(iter(before.values())).tolist() == [1, 1]
    assert type(again) is type(batch)
    contents = children(again)
    assert contents is not None
    assert next(iter(contents.values())).tolist() == [2, 2]


def test_leaves_have_no_contents() -> None:
    packed = pack_sequence([torch.ones(2)])
    assert isinstance(packed, PackedSequence)
    assert children(packed) is children(torch.ones(2)) is children("text") is None


def test_no_constructor_runs_again() -> None:
    copied = fresh(Derived(torch.tensor([1.0, -1.0]), 3.0))
    assert copied.x.tolist() == [3, -3]
    assert copied.mask.tolist() == [True, False]
    assert copied.squares.tolist() == [9, 9]
    assert not hasattr(copied, "later")


class Graph:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_objects_are_copied() -> None:
    graph = Graph(torch.ones(2))
    packed = pack_sequence([torch.ones(2)])
    copied, of_packed = fresh([graph, packed])
    copied.x.add_(1)
    of_packed.data.add_(1)
    assert graph.x.tolist() == packed.data.tolist() == [1, 1]
    iterator = iter([1, 2])
    assert fresh([iterator])[0] is iterator
    graph.x = (i for i in range(2))  # type: ignore[assignment]
    with pytest.raises(CutError, match=r"(?s)a Graph in the batch cannot be copied.*copy.deepcopy"):
        fresh([graph])


def test_a_copy_has_the_strides_of_the_tensor() -> None:
    batch = [torch.ones(2, 3).t(), torch.ones(1, 3).expand(2, 3)]
    copies = fresh(batch)
    assert [each.stride() for each in copies] == [each.stride() for each in batch]
    copies[0].add_(1)
    assert batch[0].sum() == 6


def test_a_batch_that_is_computed_from_parameters_raises() -> None:
    with pytest.raises(CutError, match="is computed from parameters before the step"):
        fresh({"x": nn.Linear(2, 2)(torch.ones(1, 2))})
    leaf = torch.ones(2, requires_grad=True)
    assert fresh(leaf * 2).requires_grad


def test_flags_and_counts_decide_the_path_and_numbers_do_not() -> None:
    x = torch.ones(2)
    assert signature((x, True)) != signature((x, False))
    assert signature({"x": x}) != signature([x])
    assert signature((x, 0.5, "a")) == signature((x, 0.7, "b"))
    assert signature((x, [3, 5])) == signature((x, [4, 1])) != signature((x, [4, 1, 1]))
