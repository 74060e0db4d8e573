"""Which tensors change in place with others, and which must not."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.in_place import InPlace
from lightning_pipe.intercept.numbers import Numbers
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.tensor_state import counting
from tests.intercept.test_tracker import Uses


@pytest.fixture
def in_place() -> InPlace:
    return InPlace(Numbers(), Uses(), partial=True)


def test_a_change_is_noticed_with_its_base(in_place: InPlace) -> None:
    x, y = torch.ones(2, 2), torch.ones(2)
    row = x[0]
    noted = in_place.noted([row, y])
    row.add_(1)
    [(changed, _, also)] = in_place.changed(noted, "add_")
    assert changed is row
    assert [each is x for each in also] == [True]
    assert [id(each) for each in in_place.written([row, x])] == [id(row), id(x)]


def test_what_is_made_in_inference_mode_changes_nowhere_else(in_place: InPlace) -> None:
    with torch.inference_mode():
        x = torch.ones(2)
        with counting():
            noted = in_place.noted([x, torch.ones(2)])
            assert not torch.ones(2, requires_grad=True).exp().requires_grad
            assert not noted[1][0].is_inference()
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
                x.add_(1)
            assert in_place.changed(noted, "add_") == []


def test_memory_that_a_result_shares_with_an_argument_must_not_change(in_place: InPlace) -> None:
    x = torch.ones(2, 3)
    flat = x.flatten()
    in_place._numbers.give(flat)
    assert in_place.lend(flat, enumerate([None, x])) == [1]
    for changed in (flat, x, x[0]):
        assert in_place.is_lent(changed)
        with pytest.raises(CutError, match="attribute of a layer shares its memory with what that has returned"):
            in_place.check_not_lent([changed], "add_")


def test_what_another_stage_writes_to_becomes_a_placeholder(in_place: InPlace) -> None:
    x = torch.ones(2, 3)
    in_place.forget([x], "add_")
    assert isinstance(x, Placeholder)
    shared = torch.ones(2)
    alias = shared.detach()
    with pytest.raises(CutError, match="and another tensor shares its memory"):
        in_place.forget([shared], "add_")
    assert alias.shape == (2,)
