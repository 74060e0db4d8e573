"""What a tensor that leaves a stage must be, and how its entry describes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LiveTensor
from lightning_pipe.intercept.crossing import check_plain, entry_of, overlapping
from lightning_pipe.tensor_spec import TensorSpec


def test_only_memory_that_overlaps_is_shared() -> None:
    x = torch.zeros(6)
    left, right, middle, other = x[:3], x[3:], x[2:4], torch.zeros(6)
    assert overlapping([left, right, other]) == set()
    assert overlapping([left, middle, other]) == {id(left), id(middle)}


def test_entries_say_what_travels() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert entry_of(4, x.t(), False) == LiveTensor(4, TensorSpec((3, 2), torch.float32, (1, 3)), True, False)
    assert entry_of(4, x * 1, True).shared
    windows = torch.ones(6).unfold(0, 3, 1)
    assert entry_of(4, windows, False).shared


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), nn.Parameter(torch.ones(2))], ids=["sparse", "type"])
def test_other_kinds_of_tensors_do_not_travel(tensor: Tensor) -> None:
    with pytest.raises(CutError, match="crosses the cut before layer 'next'"):
        check_plain(tensor, "crosses the cut before layer 'next'")
