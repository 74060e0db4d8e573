"""Is the loss of a batch the mean of its micro-batches' losses? Looked at once, on the last stage.

A sum, a mean over tokens that are not padding, class weights, and losses that compare samples with each other train
with other gradients in micro-batches than in one piece, and nothing would fail. So the last stage takes what it
received for two micro-batches, puts it together, runs the user's step on that, too, and compares.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_pipe.memory import Memory
from lightning_pipe.pipeline.cut.path import Call, Path, TensorSpec
from lightning_pipe.pipeline.recompute import recomputing
from lightning_pipe.torch_internals import DropoutNd, NormBase

if TYPE_CHECKING:
    from lightning_pipe.pipeline.stage import Batch, Inbound, Stages

_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""How far losses may differ that are equal but for rounding, relative to 1 + their size."""
_REDUCED = 5e-4
"""The same for float32 on devices that multiply matrices with fewer bits."""


_local = threading.local()


_PAIRS = 3


class _UnlikeError(Exception):
    """What two micro-batches have brought cannot be put together."""


def is_alone() -> bool:
    """Whether the code that asks runs for a check: other replicas may not, so it must not wait for them."""
    return getattr(_local, "alone", False)


@contextmanager
def _alone() -> Iterator[None]:
    _local.alone = True
    try:
        yield
    finally:
        _local.alone = False


@dataclass
class LossCheck:
    """Compares the losses of two micro-batches that come to the last stage with the loss of both together.

    Two may agree by chance (as many tokens in both), so up to three pairs of a batch are compared. The check only
    looks: what the step changes, logs or draws is put back, and whatever goes wrong ends the check alone. Dropout and
    batch norm are off, and a loss that is random nevertheless is not judged. Compiled code is left alone: another size
    and mode would have it compiled anew.

    Args:
        amounts: what each micro-batch counts.
        sizes: samples of each micro-batch.
        join: puts micro-batches together, given their numbers.
        differs: called with the numbers of the micro-batches, the weighted mean of their losses, and the loss of both
            together, if these are not the same.
        autocast: the type of numbers that the step computes with by itself; ``None``: that of its tensors.
    """

    amounts: Sequence[float]
    sizes: Sequence[int]
    join: Callable[[tuple[int, int]], Any]
    differs: Callable[[tuple[int, int], float, float], None]
    autocast: torch.dtype | None = None
    _seen: dict[int, Inbound | None] = field(default_factory=dict)
    _left: int = _PAIRS

    def see(self, stages: Stages, stage: int, micro_batch: int, batch: Batch, inbound: Inbound | None) -> None:
        """A micro-batch comes to a stage; with every second one on the last stage the check is made."""
        last = stages.layers[stage].stop == len(stages.names)
        if not last or not self._left or stages.interceptor.compiled:
            return
        # the step may change in place what it receives
        self._seen[micro_batch] = inbound and (inbound[0], inbound[0].copies(inbound[1]))
        if len(self._seen) == 2:
            with _alone(), recomputing(), torch.no_grad(), _attributes(stages), stages.buffers.restored():
                try:
                    agree = self._agree(stages, stage, batch, (min(self._seen), max(self._seen)))
                except Exception:  # whatever a step may raise that was not made for this
                    agree = False
            self._left = self._left - 1 if agree else 0
            self._seen.clear()

    def _agree(self, stages: Stages, stage: int, batch: Batch, pair: tuple[int, int]) -> bool:
        """Whether the loss of both together is the mean of the two; tells it if not."""
        parts, received = [batch.micro_batches[index] for index in pair], [self._seen[index] for index in pair]
        sizes, both_parts = [self.sizes[index] for index in pair], self.join(pair)
        together = [(both_parts, inbound) for inbound in _readings(received, sizes)]
        runs = [*zip(parts, received, strict=True), *together, (parts[0], received[0])]
        trial = replace(batch, micro_batches=[part for part, _ in runs], training=False, results={})

        def loss_of(index: int) -> Tensor:
            with _not_random(stages, stage):
                return stages.trial(stage, index, trial, runs[index][1])

        first, second, *joined = losses = [loss_of(index) for index in range(len(runs) - 1)]
        one, other, both = float(first), float(second), list(map(float, joined))
        shares, rounding = [self.amounts[index] for index in pair], self._rounding(stages, first)
        if not sum(shares) or not all(map(math.isfinite, (one, other, *both))):
            return True
        mean = (shares[0] * one + shares[1] * other) / sum(shares)
        if any(_close(mean, each, rounding) for each in both):
            return True
        if _close(float(loss_of(len(losses))), one, rounding):  # the first again, with other random numbers
            self.differs(pair, mean, both[0])
        return False

    def _rounding(self, stages: Stages, loss: Tensor) -> float:
        """The largest difference that rounding can make, by the coarsest numbers that take part."""
        received = [tensor for inbound in self._seen.values() if inbound for tensor in inbound[1].values()]
        tensors = [loss, *received, *stages.interceptor.module.parameters()]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} | {self.autocast or loss.dtype}
        reduced = loss.device.type != "cpu" and torch.float32 in dtypes
        return max([_REDUCED * reduced, *(_ROUNDING.get(dtype, 2e-3) for dtype in dtypes)])


def _close(one: float, other: float, rounding: float) -> bool:
    return abs(one - other) <= rounding * (1 + abs(other))


@contextmanager
def _attributes(stages: Stages) -> Iterator[None]:
    """What computes has the same attributes as before afterwards."""
    kept = Memory({str(number): part for number, part in enumerate(stages.interceptor.computing())})
    try:
        yield
    finally:
        kept.undo()


@contextmanager
def _not_random(stages: Stages, stage: int) -> Iterator[None]:
    """What the stage computes is as in an evaluation; up to there the step must go the way that it has gone."""
    module, layers = stages.interceptor.module, stages.interceptor.layers
    quiet: list[nn.Module] = [part for part in module.modules() if isinstance(part, DropoutNd | NormBase)]
    quiet += stages.interceptor.computing()
    before = [part.training for part in quiet]

    def begin(*_: Any) -> None:
        for part in quiet:
            part.training = False

    start = stages.layers[stage].start
    hook = layers[start].register_forward_pre_hook(begin)
    try:
        if start == 0:
            begin()
        yield
    finally:
        hook.remove()
        for part, training in zip(quiet, before, strict=True):
            part.training = training


# ------------------------------------------------------------------ putting together what two micro-batches brought


def _readings(received: Sequence[Inbound | None], sizes: Sequence[int]) -> list[Inbound | None]:
    """What a stage would receive for two micro-batches together, in all ways that it may be meant.

    Of a tensor with several elements per sample, the first of all samples may come first (``torch.cat`` of two views
    of a batch), or all of the first sample (``repeat_interleave``).
    """
    try:
        return [_inbound(received, sizes, None)]
    except _UnlikeError:
        return [_inbound(received, sizes, views) for views in (True, False)]


def _inbound(received: Sequence[Inbound | None], sizes: Sequence[int], views: bool | None) -> Inbound | None:
    """One reading; ``views=None``: every tensor has one element per sample, or is the same for both."""
    first, second = received
    if first is None or second is None:
        return None
    entries = []
    for one, other in zip(first[0].entries, second[0].entries, strict=True):
        _same(one._replace(spec=None), other._replace(spec=None))  # type: ignore[arg-type]
        entries.append(one._replace(spec=_spec(one.spec, other.spec, sizes, views)))
    pairs = zip(first[0].calls, second[0].calls, strict=True)
    calls = tuple(_call(one, other, sizes, views) for one, other in pairs)
    path = Path(calls, tuple(entries))
    return path, path.laid_out({n: _value(first[1][n], second[1][n], sizes, views) for n in first[1]})


def _call(one: Call, other: Call, sizes: Sequence[int], views: bool | None) -> Call:
    _same(one._replace(leaves=()), other._replace(leaves=()))
    leaves = []
    for a, b in zip(one.leaves, other.leaves, strict=True):
        if isinstance(a, TensorSpec) and isinstance(b, TensorSpec):
            leaves.append(_spec(a, b, sizes, views))
        else:
            _same(a, b)
            leaves.append(a)
    return one._replace(leaves=tuple(leaves))


def _spec(one: TensorSpec, other: TensorSpec, sizes: Sequence[int], views: bool | None) -> TensorSpec:
    dimension = _dimension(one.shape, other.shape, sizes, several=views is not None)
    _same(one.dtype, other.dtype)
    if dimension is None:
        _same(one, other)
        return one
    shape = tuple(size + other.shape[d] if d == dimension else size for d, size in enumerate(one.shape))
    if one.strides is None:
        return one._replace(shape=shape)
    # the dimensions lie in memory in the same order as before
    strides, extent = dict.fromkeys(range(len(shape)), 0), 1
    for d in sorted(strides, key=lambda d: (one.strides[d], one.shape[d])):  # type: ignore[index]
        strides[d], extent = extent, extent * shape[d]
    return TensorSpec(shape, one.dtype, tuple(strides.values()))


def _value(one: Tensor, other: Tensor, sizes: Sequence[int], views: bool | None) -> Tensor:
    dimension = _dimension(one.shape, other.shape, sizes, several=views is not None)
    if dimension is None:
        if one.shape != other.shape or not torch.equal(one, other):
            raise _UnlikeError
        return one
    if not views or one.shape[dimension] == sizes[0]:
        return torch.cat([one, other], dimension)
    several = [
        part.reshape(*part.shape[:dimension], -1, size, *part.shape[dimension + 1 :])
        for part, size in zip((one, other), sizes, strict=True)
    ]
    return torch.cat(several, dimension + 1).flatten(dimension, dimension + 1)


def _dimension(one: Sequence[int], other: Sequence[int], sizes: Sequence[int], *, several: bool) -> int | None:
    """The dimension along which a tensor has one element per sample, or else ``several``: the first that fits."""
    most = max(one, default=0) // sizes[0] if several else 1
    for times in range(1, most + 1):
        for d, pair in enumerate(zip(one, other, strict=True)):
            rests = [[*shape[:d], *shape[d + 1 :]] for shape in (one, other)]
            if [*pair] == [times * size for size in sizes] and rests[0] == rests[1]:
                return d
    return None


def _same(one: Any, other: Any) -> None:
    if one != other:
        raise _UnlikeError
