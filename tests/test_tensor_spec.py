"""Strides of tensors that are not there yet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pipe.tensor_spec import TensorSpec

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("tensor", "dense", "overlaps"),
    [
        (X, True, False),
        (X.t(), True, False),
        (X[:, ::2], False, False),
        (torch.ones(1, 3).expand(2, 3), False, False),
        (torch.arange(6.0).unfold(0, 3, 1), False, True),
    ],
    ids=["contiguous", "transposed", "gaps", "expanded", "windows"],
)
def test_a_tensor_is_laid_out_as_it_was(tensor: Tensor, dense: bool, overlaps: bool) -> None:
    spec = TensorSpec.of(tensor)
    assert spec.strides is None or (spec.dense, spec.overlaps) == (dense, overlaps)
    laid = spec.lay_out(tensor.contiguous().clone())
    assert torch.equal(laid, tensor)
    assert overlaps or laid.stride() == tensor.stride()
