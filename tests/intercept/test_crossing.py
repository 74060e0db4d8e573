"""One hop over a boundary: what leaves, what comes to a later stage, and what goes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord, LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.tensor_spec import TensorSpec


def crossing(calls: int, tensors: dict[int, Tensor]) -> Crossing:
    """What leaves after some calls."""
    entries = tuple(LiveTensor(n, TensorSpec.of(each), each.requires_grad, False) for n, each in tensors.items())
    return Crossing(RunRecord(tuple(CallRecord(f"layer{n}", (n,), (False,)) for n in range(calls)), entries), tensors)


def test_stages_that_took_different_paths_are_refused() -> None:
    with pytest.raises(CutError, match="another path"):
        crossing(1, {}).joined(crossing(3, {}))


def test_copies_have_the_strides_of_what_was_expanded() -> None:
    expanded = torch.ones(1, 3).expand(2, 3)
    copy = crossing(0, {0: expanded}).copied().tensors[0]
    assert copy.stride() == expanded.stride() == (0, 1)
    assert copy.data_ptr() != expanded.data_ptr()


def test_values_get_the_strides_that_they_had() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    path = crossing(0, {0: transposed, 1: torch.ones(())}).path
    laid = Crossing(path, {0: transposed.contiguous()}).copied().tensors
    assert list(laid) == [0]
    assert laid[0].stride() == (1, 3)
    assert torch.equal(laid[0], transposed)
