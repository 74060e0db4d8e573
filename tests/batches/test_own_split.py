"""Along which dimension a user's own ``split_batch`` has split a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pipe.batches.own_split import put_together, slices_of

X, Y = torch.arange(12.0).reshape(3, 4), np.arange(4)
TABLE = torch.ones(5)


def part(where: slice) -> dict[str, Any]:
    return {"x": X[:, where], "y": Y[where], "names": ["a", "b", "c", "d"][where], "table": TABLE, "kind": "plain"}


BATCH, PARTS = part(slice(None)), [part(slice(0, 3)), part(slice(3, 4))]


def test_each_value_has_its_own_dimension() -> None:
    found = slices_of(BATCH, PARTS)
    assert found == ([3, 1], {"x": 1, "y": 0, "names": 0, "table": -1, "kind": -1})
    joined = put_together(PARTS, found[1])
    assert torch.equal(joined["x"], X)
    assert joined["y"].tolist() == Y.tolist()
    assert (joined["names"], joined["table"], joined["kind"]) == (BATCH["names"], TABLE, "plain")


@pytest.mark.parametrize(
    "change",
    [
        {"x": X[:, 2:]},  # overlaps
        {"y": Y[2:]},  # other sizes than the rest
        {"kind": "other"},
        {"names": ("d",)},
        {"x": X[0]},
    ],
)
def test_what_is_no_slice_is_not_taken_for_one(change: dict[str, Any]) -> None:
    assert slices_of(BATCH, [PARTS[0], {**PARTS[1], **change}]) is None


def test_a_list_may_be_split_into_tuples() -> None:
    found = slices_of([X, Y], [(X[:, :3], Y[:3]), (X[:, 3:], Y[3:])])
    assert found == ([3, 1], {0: 1, 1: 0})


def test_a_batch_that_nobody_has_split_is_none() -> None:
    assert slices_of({"table": TABLE}, [{"table": TABLE}, {"table": TABLE}]) is None
