"""What a record says about values and tensors."""

from __future__ import annotations

import math

import torch

from lightning_pipe.intercept.call_record import LEAF, CallRecord, LiveTensor, RunRecord, Value
from lightning_pipe.tensor_spec import TensorSpec


def record(*tensors: torch.Tensor) -> RunRecord:
    entries = tuple(LiveTensor(n, TensorSpec.of(tensor), False, False) for n, tensor in enumerate(tensors))
    return RunRecord((), entries)


def test_values_are_equal_as_bytes() -> None:
    assert Value.of(math.nan) == Value.of(math.nan)
    assert Value.of(1) != Value.of(1.0)
    assert Value.of([1, "a"]).value == [1, "a"]


def test_single_elements_are_told() -> None:
    assert record(torch.ones(()), torch.ones(2), torch.ones(1, 1)).single_numbers == {0, 2}


def test_values_are_exchanged_in_the_calls() -> None:
    sine = CallRecord("sin", (0,), (True,), LEAF, (TensorSpec((2,), torch.float32),))
    one, other = (RunRecord((CallRecord("item", (), (), LEAF, (Value.of(n),)), sine), ()) for n in (1.0, 2.0))
    assert one != other
    assert one.with_values(other.values) == other
    assert one.with_values([]).calls[1:] == one.calls[1:]
