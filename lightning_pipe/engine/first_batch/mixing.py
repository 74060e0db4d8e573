"""Does what a stage computes for a sample depend on the other samples? Looked at beside losses, for earlier stages.

The loss check sees what the last stage does with samples. Before it, a tensor may be cut that holds no samples, or cut
along time, and layers may compare samples with each other: every stage then computes something else than one device,
and the loss is the mean over samples that it should be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipe.engine.batch import Batch, BatchObserver
from lightning_pipe.engine.first_batch.both_together import PackedOrders, joinings, packed_orders, readings
from lightning_pipe.engine.first_batch.trial_runs import TrialRuns, leaving_no_trace
from lightning_pipe.engine.stage import Crossings, Stages
from lightning_pipe.intercept.crossing import Crossing

_ROUNDING = {torch.float64: (1e-12, 1e-7), torch.float32: (2e-6, 5e-3), torch.float16: (0.01, 0.05)}
"""How far tensors differ, relative to their norm, by rounding for sure, and at most: it adds up over layers."""
_COARSE = (0.05, 0.2)
"""The same for types with fewer bits."""
TIMES = 30
"""How many times what rounding makes of a micro-batch with itself is more than rounding."""


@dataclass
class MixingCheck(BatchObserver):
    """Compares what leaves a stage for two micro-batches with what leaves it for both together.

    It only looks, as `LossCheck` does. What is random is not judged.

    Args:
        sizes: samples of each micro-batch.
        join: puts micro-batches together, given their numbers.
        tell: is given the layers of a stage that mixes samples, and the samples of the two micro-batches, or none if
            these could not be compared.
        pairs: how many pairs are compared at most.
    """

    sizes: Sequence[int]
    join: Callable[[tuple[int, int]], Any]
    tell: Callable[[str, Sequence[int]], None]
    pairs: int = 3
    _seen: dict[int, dict[int, Crossing | None]] = field(default_factory=dict)
    _tried: Counter[int] = field(default_factory=Counter)

    @override
    def before_stage(
        self, stages: Stages, stage: int, micro_batch: int, batch: Batch, inbound: Crossing | None
    ) -> None:
        """A micro-batch comes to a stage; with every second one the check is made."""
        seen = self._seen.setdefault(stage, {})
        if self._tried[stage] >= self.pairs:
            return
        # the step may change in place what it receives
        seen[micro_batch] = inbound and inbound.copied()
        if len(seen) < 2:
            return
        self._tried[stage] += 1
        pair, layers = (min(seen), max(seen)), stages.layers[stage]
        received, mixes = [seen.pop(index) for index in pair], None
        with leaving_no_trace(), suppress(Exception):  # whatever a step may raise that was not made for this
            mixes = self._mixes(TrialRuns(stages, stage, batch), pair, received)
        if mixes is not False:
            self._tried[stage] = self.pairs
            names = dict.fromkeys((layers.first_name, layers.names[layers.layers.stop - 1]))
            self.tell(" to ".join(f"'{name}'" for name in names), [self.sizes[each] for each in pair] if mixes else [])

    def _mixes(self, runs: TrialRuns, pair: tuple[int, int], received: Sequence[Crossing | None]) -> bool:
        # all with the random numbers of the first one, so that they take the same way
        parts = [runs.batch.micro_batches[index] for index in pair]
        singles = [runs.run(pair[0], part, inbound)[0] for part, inbound in zip(parts, received, strict=True)]

        def apart(one: int, other: int) -> list[float]:
            """How far the tensors that leave for two of them together are from those that leave for each."""
            sizes, found = [self.sizes[pair[one]], self.sizes[pair[other]]], list[list[float]]()
            both, packed = self.join((pair[one], pair[other])), packed_orders((parts[one], parts[other]))
            for inbound in readings((received[one], received[other]), sizes, packed=packed):
                with suppress(Exception):  # meant in another way
                    left = runs.run(pair[0], both, inbound)[0]
                    found.append(_distances((singles[one], singles[other]), left, sizes, packed))
            return min(found, key=lambda each: max(each, default=0.0))

        bounds = [_ROUNDING.get(tensor.dtype, _COARSE) for tensor in _tensors(singles[0])]
        found = _judged(apart(0, 1), (apart(place, place) for place in range(2)), bounds)
        if found is not None:
            return found
        if runs.drew and not runs.whole:
            return self._mixes(replace(runs, whole=True, drew=False), pair, received)
        return not runs.are_random(pair[0], parts[0], received[0], lambda left, _: same(left, singles[0]))


def _judged(
    apart: Sequence[float], twice: Iterable[Sequence[float]], bounds: Sequence[tuple[float, float]]
) -> bool | None:
    """Whether tensors of two micro-batches together are further ``apart`` than by rounding; ``None``: if not random.

    What is made of one micro-batch ``twice`` shows rounding: means over samples stay the same, and so does what is
    drawn for as many samples.
    """
    if all(each <= least for each, (least, _) in zip(apart, bounds, strict=True)):
        return False
    try:
        noise = [max(each) for each in zip(*twice, strict=True)]
    except Exception:  # a micro-batch cannot be put together with itself
        noise = [math.inf for _ in apart]
    found = [*zip(apart, noise, bounds, strict=True)]
    if any(each > max(least, TIMES * rounding) for each, rounding, (least, _) in found):
        return True
    # samples may be compared with their neighbours
    return None if any(each > most or most < rounding < math.inf for each, rounding, (_, most) in found) else False


def _distances(
    singles: Sequence[Crossings], both: Crossings, sizes: Sequence[int], packed: PackedOrders
) -> list[float]:
    """How far what leaves for both together is from what leaves for the two; 0 if they cannot be put together."""
    found = []
    for first, second, together in zip(*map(_tensors, (*singles, both)), strict=True):
        joined = [each for each in joinings(first, second, sizes, packed) if each.shape == together.shape]
        found.append(min((_distance(together, each) for each in joined), default=0.0))
    return found


def same(one: Crossings, other: Crossings, bound: int = 1) -> bool:
    """Whether what leaves a stage differs by rounding alone; ``bound``: 0 for sure, 1 at most."""
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(a.shape == b.shape and _distance(a, b) <= _ROUNDING.get(a.dtype, _COARSE)[bound] for a, b in pairs)


def _tensors(left: Crossings) -> Iterator[Tensor]:
    for to in sorted(left):
        yield from left[to].tensors.values()


def _distance(one: Tensor, other: Tensor) -> float:
    """Relative to the norm; infinite for other integers and where one alone is finite, 0 if neither is."""
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    if bool(one.isfinite().all()) != bool(other.isfinite().all()):
        return math.inf
    difference, size = (one.double() - other.double()).norm(), other.double().norm()
    return float(difference / size) if difference > 0 and torch.isfinite(difference + size) else 0.0
