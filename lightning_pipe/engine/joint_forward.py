"""One forward pass over two micro-batches that are recomputed one by one: forward doubling, backward halving.

Both leave a stage as two passes would have left it, so nothing else has to know of it::

    received for 0 --+                                    +-- leaves for 0
                     +-- one run of the user's step over -+
    received for 1 --+   the samples of both              +-- leaves for 1

Whether a stage makes of both together what it makes of each is not assumed: when two micro-batches of the same shapes
come for the second time, they run apart, and then once more together, for comparison alone. Layers that mix samples, as
batch norm does in training, that draw random numbers, as dropout does, or that keep something of their calls run them
apart from then on, as one device does.
Source: Li and Hoefler, Chimera, arXiv:2107.06925, section 3.5.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipe.engine.batch import Batch
from lightning_pipe.engine.first_batch.trial_runs import leaving_no_trace
from lightning_pipe.engine.stage import Crossings, Kept, Stages
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import RunRecord, Shape, Value
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.digest import GivenOtherValuesError
from lightning_pipe.tensor_spec import TensorSpec

Received = Sequence[Crossing | None]

_ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 0.01}
"""How far tensors differ by rounding alone, relative to their norm; other types have fewer bits."""


class UnlikeError(Exception):
    """What two micro-batches have brought cannot be put together."""


class _Way(NamedTuple):
    """How two micro-batches pass a stage together: what leaves for both, and what would for each."""

    both: dict[int, RunRecord]
    each: Sequence[dict[int, RunRecord]]


@dataclass
class JointForward:
    """Runs two forward passes of a stage as one where that changes nothing.

    Args:
        stages: computes.
        passes: how many it has run as one.
    """

    stages: Stages
    passes: int = 0
    _seen: set[Hashable] = field(default_factory=set)
    _ways: dict[Hashable, _Way | None] = field(default_factory=dict)

    def run(self, stage: int, pair: Sequence[int], batch: Batch, received: Received) -> list[tuple[Kept, Crossings]]:
        """What `Stages.forward_again` returns for each of two micro-batches."""
        modes = tuple(part.training for part in self.stages.interceptor.state.root_of)
        key = stage, *(batch.signatures[index] for index in pair), modes
        way = self._ways.get(key)
        if way is not None and batch.cut is not None:
            with suppress(UnlikeError, GivenOtherValuesError):  # the runs apart tell of the last one
                kept, both = self._run(stage, pair, batch, received)
                if {to: crossing.path for to, crossing in both.items()} != way.both:
                    raise UnlikeError
                self.passes += 1
                calls = [next(iter(paths.values())).calls for paths in way.each]
                left = [_part(both, paths, place) for place, paths in enumerate(way.each)]
                return [(replace(kept, inbound=received[i], calls=calls[i], sums=None), left[i]) for i in range(2)]
            self._ways[key] = None
        apart = [self.stages.forward_again(stage, pair[i], batch, inbound) for i, inbound in enumerate(received)]
        if key not in self._seen:  # it may never come again
            self._seen.add(key)
        elif key not in self._ways and batch.cut is not None:
            self._ways[key] = self._learnt(stage, pair, batch, received, [left for _, left in apart])
        return apart

    def _run(self, stage: int, pair: Sequence[int], batch: Batch, received: Received) -> tuple[Kept, Crossings]:
        """A run over the samples of both, in which nothing may be drawn: the numbers would be those of the first."""
        assert batch.cut is not None
        inbound = both_together(received, [batch.cut.sizes[index] for index in pair])
        parts = [batch.cut.together(pair)] * (pair[0] + 1)
        with batch.streams.noting_draws() as drew:
            kept, both = self.stages.forward_again(stage, pair[0], replace(batch, micro_batches=parts), inbound)
        keeps = any(call.effects or call.changing for crossing in both.values() for call in crossing.path.calls)
        if keeps or kept.first.formers.keys() - self.stages.interceptor.state.set_by_run.keys():
            raise CutError(
                f"stage {stage} has begun to keep something of its calls, of which one forward pass over two "
                "micro-batches leaves another value than two passes.",
                hint="Use a schedule without such passes: Chimera(scaling='direct').",
            )
        if True in drew:
            raise UnlikeError
        return kept, both

    def _learnt(
        self, stage: int, pair: Sequence[int], batch: Batch, received: Received, apart: Sequence[Crossings]
    ) -> _Way | None:
        """How the two pass the stage together, if that makes of them what two passes have made."""
        each = [{to: left[to].path for to in left} for left in apart]
        # whatever a step may raise that was not made for this
        with leaving_no_trace(self.stages), torch.enable_grad(), suppress(Exception):
            _, both = self._run(stage, pair, batch, received)
            if all(_is_part(_part(both, each[i], i), apart[i], both) for i in range(2)):
                return _Way({to: crossing.path for to, crossing in both.items()}, each)
        return None


def both_together(received: Received, sizes: Sequence[int]) -> Crossing | None:
    """What a stage would receive for two micro-batches together.

    Args:
        received: what it has received for each of them.
        sizes: their samples.

    Raises:
        UnlikeError: it cannot be put together.
    """
    first, second = (
        each and (each.path.calls, each.path.entries, tuple(each.tensors.items()), each.words) for each in received
    )
    if first is None:
        return None
    calls, entries, tensors, words = _together(first, second, sizes)
    return Crossing(RunRecord(calls, entries), dict(tensors), words).laid_out()


def _together(one: Any, other: Any, sizes: Sequence[int]) -> Any:
    """A tensor, or what tells of tensors, for both together.

    Samples lie along the first dimension if it has as many elements as samples; what has others is the same for both.
    """
    found = one
    if isinstance(one, Tensor):
        if _shape(one.shape, other.shape, sizes) == one.shape:
            alike = torch.equal(one, other)
        else:
            # whole numbers may be positions in a micro-batch, which are others in both together
            alike = one.is_floating_point() or one.dtype is torch.bool
            found = torch.cat([one, other])
    elif type(one) is not type(other):
        alike = False
    elif isinstance(one, TensorSpec):
        found = one._replace(shape=_shape(one.shape, other.shape, sizes))
        # samples that lie between each other would have other strides together
        behind = found == one or one.strides is None or one.strides[0] == max(one.strides)
        alike = behind and one[1:] == other[1:]
    elif isinstance(one, Shape):
        alike, found = True, Shape(_shape(one, other, sizes))
    elif type(one) is tuple or hasattr(one, "_make"):
        alike, make = len(one) == len(other), getattr(one, "_make", tuple)
        found = make([_together(*pair, sizes) for pair in zip(one, other, strict=False)]) if alike else one
    else:
        alike = one == other
    if not alike:
        raise UnlikeError
    return found


def _shape(one: Sequence[int], other: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    if [*one[:1], *other[:1]] == [*sizes] and one[1:] == other[1:]:
        return (one[0] + other[0], *one[1:])
    if one != other:
        raise UnlikeError
    return tuple(one)


def _part(both: Crossings, paths: dict[int, RunRecord], place: int) -> Crossings:
    """What leaves for one of the two, cut out along the first dimension where both together are longer."""
    found: Crossings = {}
    for to, path in paths.items():
        tensors = {}
        for number, spec, *_ in path.entries:
            tensor = both[to].tensors[number]
            if spec.shape != tensor.shape:
                tensor = tensor[-spec.shape[0] :] if place else tensor[: spec.shape[0]]
            tensors[number] = tensor.clone(memory_format=torch.contiguous_format)
        found[to] = Crossing(path, tensors, both[to].words).laid_out()
    return found


def _is_part(part: Crossings, alone: Crossings, both: Crossings) -> bool:
    """Whether what leaves for both together shows what leaves for one of the two, and always will."""
    for to, crossing in alone.items():
        calls = (*crossing.path.calls, *both[to].path.calls)
        # what is drawn or read may be something else in the next batch
        values = any(call.drawn or any(isinstance(leaf, Value) for leaf in call.leaves) for call in calls)
        if values or crossing.words != both[to].words:
            return False
        for one, other in zip(crossing.path.entries, both[to].path.entries, strict=True):
            # what is one for all samples, and constant, may be the same for both by chance: a penalty of 0, say
            chance = one.spec.shape == other.spec.shape and torch.unique(crossing.tensors[one.number]).numel() < 2
            if chance or one[2:] != other[2:]:
                return False
    pairs = [(tensor, alone[to].tensors[number]) for to in part for number, tensor in part[to].tensors.items()]
    return all(one.shape == other.shape and _is_close(one, other) for one, other in pairs)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by rounding alone."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    difference = (one.double() - other.double()).norm()
    return bool(difference <= _ROUNDING.get(one.dtype, 0.05) * other.double().norm())
