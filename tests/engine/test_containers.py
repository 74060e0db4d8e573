"""What batches are made of: contents, copies, and what tells their shapes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
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


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2)},
        UserDict({"x": torch.ones(2)}),
        [torch.ones(2)],
        (torch.ones(2), 1),
        Pair(torch.ones(2), torch.ones(2)),
        Sample(torch.ones(2)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_container_keeps_its_kind(batch: Any) -> None:
    again = map_leaves(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, batch)
    assert type(again) is type(batch)
    contents = children(again)
    assert contents is not None
    assert next(iter(contents.values())).tolist() == [2, 2]


def test_leaves_have_no_contents() -> None:
    packed = pack_sequence([torch.ones(2)])
    assert isinstance(packed, PackedSequence)
    assert children(packed) is children(torch.ones(2)) is children("text") is None


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
