"""The words that tell whether two stages give their calls the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.digest import Digest
from lightning_pipe.intercept.numbers import Numbers


def digest() -> Digest:
    return Digest(Numbers(), lambda tensor: None)


def word(*leaves: Any, module: nn.Module | None = None) -> int:
    """The word of a call in a run of its own."""
    run = digest()
    run.call("mul", leaves, (), module)
    return run.words[0]


def word_after(*names: str) -> int:
    """The word of a call with a batch on which functions of these names were called."""
    run, tensor = digest(), torch.ones(2)
    run.begin([tensor, "text"])
    for name in names:
        made = torch.ones(2)
        run.follow((name,), [tensor, 2], [made], (), drawn=False)
        tensor = made
    run.call("mul", [tensor])
    return run.words[0]


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale


DIFFERENT: list[tuple[Any, Any]] = [
    (1.0, 0.9),
    (-1, -2),
    (1e-8, 2e-8),
    (1j, 2j),
    ("mean", "sum"),
    (torch.float32, torch.float64),
    (slice(0, 2), slice(0, 3)),
    ([1, [2.5]], [1, [2.25]]),
    ({"a": 1}, {"a": 2}),
    ({1, 2}, {1, 3}),
    (Settings(1.0), Settings(2.0)),
    (np.ones(2), np.zeros(2)),
    (torch.ones(2), torch.zeros(2)),
    (torch.ones(2, 1), torch.ones(1, 2)),
    (torch.ones(200_000), torch.zeros(200_000)),
    (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    (torch.eye(2).to_sparse_csr(), 2 * torch.eye(2).to_sparse_csr()),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=lambda pair: type(pair[0]).__name__)
def test_other_values_give_another_word(pair: tuple[Any, Any]) -> None:
    assert word(pair[0]) != word(pair[1])


ALIKE: list[tuple[Any, Any]] = [
    (1, 1.0),
    (0.1 + 0.2, 0.3),
    (float("nan"), -float("nan")),
    ("cuda:0", "cuda:1"),
    (Settings(1.0), Settings(1.0)),
    (torch.ones(2), torch.ones(2)),
    (torch.tensor([0x7FC00001]).int().view(torch.float32), torch.tensor([0x7FC00002]).int().view(torch.float32)),
    (torch.ones(4)[::2], torch.ones(2)),
    (torch.empty(0), torch.empty(0)),
    (torch.ones(3)[2].expand(1, 1), torch.ones(1, 1)),
]


@pytest.mark.parametrize("pair", ALIKE, ids=lambda pair: type(pair[0]).__name__)
def test_what_computes_the_same_has_the_same_word(pair: tuple[Any, Any]) -> None:
    assert word(pair[0]) == word(pair[1])


def test_the_mode_of_a_module_counts() -> None:
    layer = nn.Dropout()
    assert word(module=layer) != word(module=layer.eval())


def test_a_tensor_that_changes_in_place_has_another_word() -> None:
    run, values = digest(), torch.ones(2)
    before = run.of(values)
    assert run.of(values) == before
    values.add_(1)
    assert run.of(values) != before


def test_of_the_batch_counts_what_it_went_through() -> None:
    assert word_after("mul", "add") == word_after("mul", "add")
    assert len({word_after("mul", "add"), word_after("add", "mul"), word_after("mul"), word_after()}) == 4


def test_changes_in_place_and_draws_count() -> None:
    run, batch = digest(), torch.ones(2)
    run.begin([batch])
    before = run.of(batch)
    run.follow(("add_",), [batch, 1], [batch], [batch], drawn=False)
    assert run.of(batch) != before
    drawn = digest()
    drawn.draw("rand")
    drawn.call("mul", [1])
    assert drawn.words != [word(1)]


@pytest.mark.parametrize("alias", [lambda batch: batch[:1], lambda batch: batch.detach()])
def test_a_change_counts_under_each_name_of_the_memory(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    words = []
    for gain in (1.0, 0.9):
        run, batch = digest(), torch.ones(2)
        run.begin([batch])
        other = alias(batch)
        run.follow(("alias",), [batch], [other], (), drawn=False)
        run.follow(("mul_",), [batch, gain], (), [batch], drawn=False)
        words.append(run.of(other))
    assert words[0] != words[1]


def test_the_names_of_keywords_count() -> None:
    run, other = digest(), digest()
    run.call("clamp", [torch.ones(2), 0.5], ["min"])
    other.call("clamp", [torch.ones(2), 0.5], ["max"])
    assert run.words != other.words


def test_parameters_and_leaves_without_a_name_count_by_value() -> None:
    for one in (nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)):
        before = digest().of(one)
        with torch.no_grad():
            one.mul_(0.9)
        assert digest().of(one) != before


def test_what_an_earlier_run_has_made_counts_by_its_values() -> None:
    run, batch, kept = digest(), torch.ones(2), torch.zeros(2)
    run.begin([batch])
    run.follow(("mul",), [batch], [kept], (), drawn=False)
    assert run.of(kept) != digest().of(kept) == digest().of(torch.zeros(2))


def test_parameters_count_by_name() -> None:
    names: dict[int, str] = {}
    run = Digest(Numbers(), lambda tensor: names[id(tensor)])
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    names.update({id(one): "one", id(other): "other"})
    assert run.of(one) != run.of(other)


def test_a_difference_names_the_call() -> None:
    first, second = digest(), digest()
    first.call("mul", [1.0])
    second.call("mul", [0.9])
    second.check("mul", 0)
    second.expected = first.words
    with pytest.raises(CutError, match="'mul', call number 0 outside layers, is given other values"):
        second.check("mul", 0)
