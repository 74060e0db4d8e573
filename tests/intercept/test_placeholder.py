"""Placeholders know shapes, dtypes and devices, and no values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.placeholder import Placeholder, shape_only
from lightning_pipe.tensor_spec import TensorSpec


@pytest.fixture
def placeholder() -> Placeholder:
    return Placeholder(TensorSpec((2, 3), torch.float64, (1, 2)), torch.device("cpu"))


def test_it_looks_like_the_tensor(placeholder: Placeholder) -> None:
    assert (placeholder.shape, placeholder.stride(), placeholder.dtype) == ((2, 3), (1, 2), torch.float64)
    assert repr(placeholder) == "Placeholder(shape=(2, 3), dtype=torch.float64, device=cpu)"
    assert isinstance(copy.deepcopy(placeholder), Placeholder)


def test_results_are_placeholders(placeholder: Placeholder) -> None:
    product = shape_only(torch.matmul, (placeholder, torch.ones(3, 4, dtype=torch.float64)), {})
    assert (type(product), product.shape) == (Placeholder, (2, 4))
    assert shape_only(Tensor.add_, (placeholder, 1.0), {}) is placeholder


def test_it_is_on_the_device_of_what_it_stands_for(placeholder: Placeholder) -> None:
    zeros = shape_only(torch.zeros_like, (placeholder,), {"device": "cuda:1"})
    assert (zeros.device, zeros.shape) == (torch.device("cuda", 1), placeholder.shape)
    spec = TensorSpec((2,), torch.float64)
    assert Placeholder(spec, zeros.device).device == zeros.device
    assert Placeholder(spec._replace(device="cpu"), zeros.device).device.type == "cpu"


@pytest.mark.parametrize("read", [torch.nonzero, Tensor.item, Tensor.tolist], ids=lambda read: read.__name__)
def test_values_cannot_be_read(placeholder: Placeholder, read: Callable[..., object]) -> None:
    with pytest.raises(CutError, match=f"'{read.__name__}' needs the value of a tensor that only another stage has"):
        shape_only(read, (placeholder,), {})


def test_a_real_tensor_must_not_change_by_it_unseen(placeholder: Placeholder) -> None:
    with pytest.raises(CutError, match="'add_' changes a tensor in place"):
        torch.ones(2, 3, dtype=torch.float64).add_(placeholder)
