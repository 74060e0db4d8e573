"""What a stage would receive for two micro-batches together, made of what it has received for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.intercept.call_record import CallRecord, RunRecord, Shape
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.tensor_spec import TensorSpec


class UnlikeError(Exception):
    """What two micro-batches have brought cannot be put together."""


def both_together(received: Sequence[Crossing | None], sizes: Sequence[int]) -> Crossing | None:
    """What a stage would receive for two micro-batches together.

    Samples lie along the first dimension if it has as many elements as samples; what has others is the same for both.

    Args:
        received: what it has received for each of them.
        sizes: their samples.

    Raises:
        UnlikeError: it cannot be put together.
    """
    first, second = received
    if first is None or second is None:
        return None
    entries = []
    for one, other in zip(first.path.entries, second.path.entries, strict=True):
        _same(one._replace(spec=None), other._replace(spec=None))  # type: ignore[arg-type]
        entries.append(one._replace(spec=_spec(one.spec, other.spec, sizes)))
    pairs = zip(first.path.calls, second.path.calls, strict=True)
    calls = tuple(_call(one, other, sizes) for one, other in pairs)
    values = {number: _value(tensor, second.tensors[number], sizes) for number, tensor in first.tensors.items()}
    return Crossing(RunRecord(calls, tuple(entries)), values).laid_out()


def _call(one: CallRecord, other: CallRecord, sizes: Sequence[int]) -> CallRecord:
    _same(one._replace(leaves=(), changing=()), other._replace(leaves=(), changing=()))
    leaves: list[Any] = []
    for a, b in zip(one.leaves, other.leaves, strict=True):
        if isinstance(a, TensorSpec) and isinstance(b, TensorSpec):
            leaves.append(_spec(a, b, sizes))
        elif isinstance(a, Shape) and isinstance(b, Shape) and len(a) == len(b):
            leaves.append(Shape(_shape(a, b, sizes)))
        else:
            _same(a, b)
            leaves.append(a)
    return one._replace(leaves=tuple(leaves))


def _spec(one: TensorSpec, other: TensorSpec, sizes: Sequence[int]) -> TensorSpec:
    shape = _shape(one.shape, other.shape, sizes)
    _same(one._replace(shape=shape), other._replace(shape=shape))
    if shape != one.shape and one.strides is not None and one.strides[0] < max(one.strides):
        raise UnlikeError  # samples lie between each other: those of both would have other strides
    return one._replace(shape=shape)


def _shape(one: Sequence[int], other: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    if [*one[:1], *other[:1]] == [*sizes] and one[1:] == other[1:]:
        return (one[0] + other[0], *one[1:])
    _same(one, other)
    return tuple(one)


def _value(one: Tensor, other: Tensor, sizes: Sequence[int]) -> Tensor:
    if _shape(one.shape, other.shape, sizes) == one.shape:
        if not torch.equal(one, other):
            raise UnlikeError
        return one
    if not one.is_floating_point() and one.dtype is not torch.bool:
        raise UnlikeError  # they may be positions in a micro-batch, which are others in both together
    return torch.cat([one, other])


def _same(one: Any, other: Any) -> None:
    if one != other:
        raise UnlikeError
