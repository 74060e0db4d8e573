"""Versions, values and identities: what tells that something has changed."""

from __future__ import annotations

import numpy as np
import torch

from lightning_pipe.intercept.tensor_state import memory_of, same_objects, same_values, version_of


def test_versions_count_where_torch_counts() -> None:
    x = torch.ones(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) != before
    with torch.inference_mode():
        assert version_of(torch.ones(2)) is None
    assert version_of(np.ones(2)) is None


def test_values_are_compared_with_their_shapes() -> None:
    for ones, twos, fewer in (
        (torch.ones(2), torch.full((2,), 2.0), torch.ones(1)),
        (np.ones(2), np.ones(2) * 2, np.ones(1)),
    ):
        assert same_values(ones, ones + 0)
        assert not same_values(ones, twos)
        assert not same_values(ones, fewer)


def test_values_of_another_type_are_not_the_same() -> None:
    assert not same_values(torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert not same_values(np.ones(2), np.ones(2, dtype=np.int64))


def test_objects_are_compared_in_order() -> None:
    x, y = torch.ones(2)
    assert same_objects([x, y], (x, y))
    assert not same_objects([x, y], [y, x])
    assert not same_objects([x], [x, y])


def test_views_have_the_memory_of_their_base() -> None:
    x = torch.ones(2, 3)
    assert memory_of(x[0]) == memory_of(x)
    assert memory_of(x.clone()) != memory_of(x)
    assert memory_of(x.to_sparse()) is None
