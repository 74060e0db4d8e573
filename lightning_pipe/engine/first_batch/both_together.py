"""What a stage would receive for two micro-batches together, made of what it has received for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_pipe.engine.containers import children
from lightning_pipe.intercept.call_record import CallRecord, RunRecord, Shape
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.tensor_spec import TensorSpec

PackedOrders = dict[int, Tensor]


class UnlikeError(Exception):
    """What two micro-batches have brought cannot be put together."""


def readings(
    received: Sequence[Crossing | None],
    sizes: Sequence[int],
    standing: int | None = None,
    packed: PackedOrders | None = None,
) -> list[Crossing | None]:
    """What a stage would receive for two micro-batches together, in all ways that it may be meant.

    Of a tensor with several elements per sample, the first of all samples may come first (``torch.cat`` of two views
    of a batch), or all of the first sample (``repeat_interleave``). Where several dimensions fit, the samples may lie
    along the first or the last of them (time may come before the samples). A tensor whose first dimension has length 1
    may belong to all samples even if another dimension fits: a bias for as many heads as there are samples.

    Args:
        received: what it has received for each of them.
        sizes: their samples.
        standing: which of the two (0 or 1) gives the values that have no dimension of samples and differ, such as a
            router's loss; ``None``: such values cannot be put together.
        packed: where rows of packed sequences lie; see `packed_orders`.

    Raises:
        UnlikeError: it cannot be put together.
    """
    found = []
    ways = [{"last": last, "whole": whole} for whole in _whole(received, sizes) for last in (False, True)]
    for way in ways:
        for reading in _readings(**way):
            try:
                found.append(_inbound(received, sizes, reading._replace(standing=standing, packed=packed or {})))
            except UnlikeError:
                continue
            if reading.views is None or reading.free:
                break
    if not found:
        raise UnlikeError
    return found


def packed_orders(parts: Sequence[Any]) -> PackedOrders:
    """Where the rows of packed sequences in micro-batches come to lie together, by their number: a step's rows meet.

    Args:
        parts: the micro-batches, which are to be put together in this order.
    """
    orders = {}
    for packs in zip(*map(_packed_in, parts), strict=True):
        sequences, rows = list[Tensor](), 0
        for each in packs:
            numbers = torch.arange(rows, rows := rows + len(each.data), device=each.data.device)
            sequences += unpack_sequence(each._replace(data=numbers))
        orders[rows] = pack_sequence(sequences, enforce_sorted=packs[0].sorted_indices is None).data
    return orders


def _packed_in(node: Any) -> list[PackedSequence]:
    if isinstance(node, PackedSequence):
        return [node]
    return [found for child in (children(node) or {}).values() for found in _packed_in(child)]


def joinings(one: Tensor, other: Tensor, sizes: Sequence[int], packed: PackedOrders | None = None) -> Iterator[Tensor]:
    """What a tensor of two micro-batches would be for both together, in all ways that it may be meant."""
    for reading in (*_readings(last=False), *_readings(last=True)):
        with suppress(UnlikeError):
            yield _value(one, other, sizes, reading._replace(packed=packed or {}))


class _Reading(NamedTuple):
    """How tensors of two micro-batches are put together.

    ``views=None``: every tensor has one element per sample, or is the same for both; otherwise whether the first
    elements of all samples come first. ``last``: which of several dimensions that fit is that of the samples.
    ``whole``: what has a first dimension of length 1 belongs to all samples. ``free``: samples may have different
    numbers of elements. ``standing``, ``packed``: see `readings`.
    """

    views: bool | None
    last: bool
    whole: bool
    free: bool
    standing: int | None = None
    packed: PackedOrders = {}  # noqa: RUF012 - nobody changes it


def _readings(*, last: bool, whole: bool = False) -> Iterator[_Reading]:
    for views, free in ((None, False), (True, False), (False, False), (False, True)):
        yield _Reading(views, last, whole, free)


def _whole(received: Sequence[Crossing | None], sizes: Sequence[int]) -> tuple[bool, ...]:
    """Whether tensors with a first dimension of length 1 belong to all samples, as far as that is to be tried."""
    tensors = [tensor for inbound in received if inbound is not None for tensor in inbound.tensors.values()]
    doubtful = any(tensor.shape[:1] == (1,) and sizes[0] in tensor.shape[1:] for tensor in tensors)
    return (False, True) if doubtful and min(sizes) > 1 else (False,)


def _inbound(received: Sequence[Crossing | None], sizes: Sequence[int], reading: _Reading) -> Crossing | None:
    first, second = received
    if first is None or second is None:
        return None
    entries = []
    for one, other in zip(first.path.entries, second.path.entries, strict=True):
        _same(one._replace(spec=None), other._replace(spec=None))  # type: ignore[arg-type]
        entries.append(one._replace(spec=_spec(one.spec, other.spec, sizes, reading)))
    pairs = zip(first.path.calls, second.path.calls, strict=True)
    calls = tuple(_call(one, other, sizes, reading) for one, other in pairs)
    values = {n: _value(tensor, second.tensors[n], sizes, reading) for n, tensor in first.tensors.items()}
    return Crossing(RunRecord(calls, tuple(entries)), values).laid_out()


def _call(one: CallRecord, other: CallRecord, sizes: Sequence[int], reading: _Reading) -> CallRecord:
    _same(one._replace(leaves=(), changing=()), other._replace(leaves=(), changing=()))
    leaves: list[Any] = []
    for a, b in zip(one.leaves, other.leaves, strict=True):
        if isinstance(a, TensorSpec) and isinstance(b, TensorSpec):
            leaves.append(_spec(a, b, sizes, reading))
        elif isinstance(a, Shape) and isinstance(b, Shape) and len(a) == len(b):
            leaves.append(Shape(_shape(a, b, _dimension(a, b, sizes, reading))))
        else:
            _same(a, b)
            leaves.append(a)
    return one._replace(leaves=tuple(leaves))


def _spec(one: TensorSpec, other: TensorSpec, sizes: Sequence[int], reading: _Reading) -> TensorSpec:
    dimension = _dimension(one.shape, other.shape, sizes, reading)
    _same(one.dtype, other.dtype)
    if dimension is None:
        _same(one, other)
        return one
    shape = _shape(one.shape, other.shape, dimension)
    if one.strides is None:
        return one._replace(shape=shape)
    # the dimensions lie in memory in the same order as before
    strides, extent = dict.fromkeys(range(len(shape)), 0), 1
    for d in sorted(strides, key=lambda d: (one.strides[d], one.shape[d])):  # type: ignore[index]
        strides[d], extent = extent, extent * shape[d]
    return TensorSpec(shape, one.dtype, tuple(strides.values()))


def _shape(one: Sequence[int], other: Sequence[int], dimension: int | None) -> tuple[int, ...]:
    if dimension is None:
        _same(one, other)
    return tuple(size + other[d] if d == dimension else size for d, size in enumerate(one))


def _value(one: Tensor, other: Tensor, sizes: Sequence[int], reading: _Reading) -> Tensor:
    dimension = _dimension(one.shape, other.shape, sizes, reading)
    if dimension is None:
        if one.shape == other.shape and reading.standing is not None and one.is_floating_point():
            return (one, other)[reading.standing]
        if one.shape != other.shape or not torch.equal(one, other):
            raise UnlikeError
        return one
    if not one.is_floating_point() and one.dtype is not torch.bool:
        raise UnlikeError  # they may be positions in a micro-batch, which are others in both together
    both = torch.cat([one, other], dimension)
    if _is_packed(one.shape, other.shape, sizes, reading):
        return both[reading.packed[len(both)].to(both.device)]
    if not reading.views or one.shape[dimension] == sizes[0]:
        return both
    several = [
        part.reshape(*part.shape[:dimension], -1, size, *part.shape[dimension + 1 :])
        for part, size in zip((one, other), sizes, strict=True)
    ]
    return torch.cat(several, dimension + 1).flatten(dimension, dimension + 1)


def _is_packed(one: Sequence[int], other: Sequence[int], sizes: Sequence[int], reading: _Reading) -> bool:
    """Whether a tensor has as many rows as a packed sequence, and not as many as samples."""
    return bool(one and other) and one[0] + other[0] in reading.packed and one[0] != sizes[0]


def _dimension(one: Sequence[int], other: Sequence[int], sizes: Sequence[int], reading: _Reading) -> int | None:
    """The dimension along which a tensor has one element per sample, or else, unless there must be one, several."""
    if reading.whole and [*one[:1], *other[:1]] == [1, 1]:
        return None
    if _is_packed(one, other, sizes, reading):
        return 0
    fits: dict[bool, list[int]] = {True: [], False: []}
    for d, pair in enumerate(zip(one, other, strict=True)):
        times = pair[0] // sizes[0]
        rests = [[*shape[:d], *shape[d + 1 :]] for shape in (one, other)]
        if times and [*pair] == [times * size for size in sizes] and rests[0] == rests[1]:
            fits[times == 1].append(d)
    several = fits[False] if reading.views is not None else []
    if found := fits[True] or several:
        return found[-1 if reading.last else 0]
    differing = [d for d, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    return differing[0] if reading.free and len(differing) == 1 else None


def _same(one: Any, other: Any) -> None:
    if one != other:
        raise UnlikeError
