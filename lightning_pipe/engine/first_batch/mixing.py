"""Does what a stage computes for a sample depend on the other samples? Looked at in the first batch for earlier stages.

The loss check sees what the last stage does with samples. Before it, a tensor may be cut that holds no samples, or cut
along time, and layers may compare samples with each other: every stage then computes something else than one device,
and the loss is the mean over samples that it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipe.engine.batch import Batch, BatchObserver
from lightning_pipe.engine.first_batch.both_together import joinings, readings
from lightning_pipe.engine.first_batch.trial_runs import TrialRuns, leaving_no_trace
from lightning_pipe.engine.stage import Crossings, Stages
from lightning_pipe.intercept.crossing import Crossing

_ROUNDING = {torch.float64: 1e-7, torch.float32: 5e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""How far tensors may differ that are equal but for rounding, relative to their norm: it adds up over layers."""


@dataclass
class MixingCheck(BatchObserver):
    """Compares what leaves a stage for two micro-batches with what leaves it for both together.

    It only looks, as `LossCheck` does. What is random or cannot be put together is not judged.

    Args:
        sizes: samples of each micro-batch.
        join: puts micro-batches together, given their numbers.
        tell: is given the names of the first and last layer of a stage that mixes samples, and the samples of the two
            micro-batches.
    """

    sizes: Sequence[int]
    join: Callable[[tuple[int, int]], Any]
    tell: Callable[[str, str, int, int], None]
    _seen: dict[int, dict[int, Crossing | None]] = field(default_factory=dict)

    @override
    def before_stage(
        self, stages: Stages, stage: int, micro_batch: int, batch: Batch, inbound: Crossing | None
    ) -> None:
        """A micro-batch comes to a stage; with the second one the check is made."""
        seen = self._seen.setdefault(stage, {})
        if len(seen) == 2:
            return
        # the step may change in place what it receives
        seen[micro_batch] = inbound and inbound.copied()
        if len(seen) < 2:
            return
        pair = (min(seen), max(seen))
        with leaving_no_trace(stages):
            try:
                mixes = self._mixes(TrialRuns(stages, stage, batch), pair, [seen[index] for index in pair])
            except Exception:  # whatever a step may raise that was not made for this
                mixes = False
        if mixes:
            layers = stages.layers[stage]
            self.tell(layers.first_name, layers.names[layers.layers.stop - 1], *(self.sizes[index] for index in pair))
        self._seen[stage] = dict.fromkeys(pair)

    def _mixes(self, runs: TrialRuns, pair: tuple[int, int], received: Sequence[Crossing | None]) -> bool:
        sizes = [self.sizes[index] for index in pair]
        parts = [runs.batch.micro_batches[index] for index in pair]
        # all with the random numbers of the first one, so that they take the same way
        singles = [runs.run(pair[0], part, inbound)[0] for part, inbound in zip(parts, received, strict=True)]
        both = self.join(pair)
        found = []
        for inbound in readings(received, sizes):
            with suppress(Exception):  # meant in another way
                found.append(_alike(singles, runs.run(pair[0], both, inbound)[0], sizes))
        if not found or any(found):
            return False
        if runs.drew and not runs.whole:
            # a step that leaves layers out at random asks whether the module is in training
            return self._mixes(replace(runs, whole=True), pair, received)
        return not runs.are_random(pair[0], parts[0], received[0], lambda left, _: _same(left, singles[0]))


def _alike(singles: Sequence[Crossings], both: Crossings, sizes: Sequence[int]) -> bool:
    """Whether what leaves for both together is what leaves for the two; tensors that cannot be put together pass."""
    for first, second, together in zip(*map(_tensors, (*singles, both)), strict=True):
        joined = [each for each in joinings(first, second, sizes) if each.shape == together.shape]
        if joined and not any(_close(together, each) for each in joined):
            return False
    return True


def _same(one: Crossings, other: Crossings) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _tensors(left: Crossings) -> Iterator[Tensor]:
    for to in sorted(left):
        yield from left[to].tensors.values()


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    difference, size = (one.double() - other.double()).norm(), other.double().norm()
    return bool(difference <= _ROUNDING.get(one.dtype, 0.2) * size) or not bool(torch.isfinite(difference + size))
