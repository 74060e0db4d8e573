"""Is the loss of a batch the mean of its micro-batches' losses? Looked at in some batches, on the last stage.

A sum, a mean over tokens that are not padding, class weights, and losses that compare samples with each other train
with other gradients in micro-batches than in one piece, and nothing would fail. So the last stage takes what it
received for two micro-batches, puts it together, runs the user's step on that, too, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipe.engine.batch import Batch, BatchObserver
from lightning_pipe.engine.first_batch.both_together import PackedOrders, UnlikeError, packed_orders, readings
from lightning_pipe.engine.first_batch.mixing import TIMES, MixingCheck
from lightning_pipe.engine.first_batch.trial_runs import TrialRuns, leaving_no_trace
from lightning_pipe.engine.stage import Stages, loss_of
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.crossing import Crossing

_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""How far losses may differ that are equal but for rounding, relative to 1 + their size."""
_LEAST = 1e-6
"""How far they do so in float32 for sure."""
_REDUCED = 5e-4
"""The same for float32 on devices that multiply matrices with fewer bits."""


class _DiffersError(Exception):
    """The loss differs from run to run."""


@dataclass
class LossCheck(BatchObserver):
    """Compares the losses of two micro-batches that come to the last stage with the loss of both together.

    Two may agree by chance (as many tokens in both, samples of one class), so all neighbours in a batch may be
    compared. The check only looks: what the step changes, logs or draws is put back, and whatever goes wrong ends the
    check alone. Dropout and batch norm are off, and a loss that differs from run to run nevertheless is not judged.
    Compiled code is left alone: another size and mode would have it compiled anew.

    Args:
        amounts: what each micro-batch counts, by what the loss may be a mean over; the first one is what is taken.
        sizes: samples of each micro-batch.
        join: puts micro-batches together, given their numbers.
        summed: whether the loss of both is expected to be the sum of their losses, not the mean.
        pairs: how many pairs are compared at most.
        mixing: looks at the stages before the last one; ``None``: nobody does.

    Attributes:
        amounts: those that have predicted the losses of both together.
        autocast: the type of numbers that the step computes with by itself; ``None``: that of its tensors.
        differs: the numbers of two micro-batches, what their losses make, and the loss of both together, if these are
            not the same.
        agreed: whether a pair was compared, and agreed.
        reason: why a pair could not be compared, in words.
        most: the largest difference that rounding can make.
        rounding: the largest one that it makes of the losses of this pair.
    """

    amounts: Mapping[str, Sequence[float]]
    sizes: Sequence[int]
    join: Callable[[tuple[int, int]], Any]
    summed: bool = False
    pairs: int = 3
    mixing: MixingCheck | None = None
    autocast: torch.dtype | None = None
    differs: tuple[tuple[int, int], float, float] | None = None
    agreed: bool = False
    reason: str | None = None
    most: float = 0.0
    rounding: float = 0.0
    _seen: dict[int, Crossing | None] = field(default_factory=dict)
    _tried: int = 0

    @override
    def before_stage(
        self, stages: Stages, stage: int, micro_batch: int, batch: Batch, inbound: Crossing | None
    ) -> None:
        """A micro-batch comes to a stage; on the last stage it is compared with the one before."""
        if stages.interceptor.compiled:
            return
        if not stages.layers[stage].last and self.mixing is not None:
            self.mixing.before_stage(stages, stage, micro_batch, batch, inbound)
        if not stages.layers[stage].last or self._tried >= self.pairs:
            return
        # the step may change in place what it receives
        self._seen[micro_batch] = inbound and inbound.copied()
        if (pair := self._pair(micro_batch)) is None:
            return
        self._tried += 1
        with leaving_no_trace():
            try:
                self._compare(TrialRuns(stages, stage, batch), pair)
            except UnlikeError:
                self.reason = "layers get tensors of which two micro-batches' cannot be put together"
            except _DiffersError:
                self.reason = "it differs from run to run, though dropout is off"
            except CutError:
                self.reason = "with two micro-batches together the step takes another way through its code"
            except Exception as error:  # whatever a step may raise that was not made for this
                lines = str(error).strip().splitlines() or [""]
                self.reason = f"two micro-batches together raise {type(error).__name__}: {lines[0]}"
        if self.differs is not None:
            self._tried = self.pairs
        self._seen = {micro_batch: inbound and inbound.copied()}

    @override
    def before_layer(self, *call: Any) -> None:
        """A layer is about to run: in the type that the step computes with."""
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self.autocast = torch.get_autocast_dtype(kind)

    def _pair(self, micro_batch: int) -> tuple[int, int] | None:
        """Two micro-batches to compare, if there are two by now that tell apart what the loss may be a mean over."""
        if len(self._seen) < 2:
            return None
        pair = (min(self._seen), max(self._seen))
        (one, other), *others = [[amounts[index] for index in pair] for amounts in self.amounts.values()]
        if others and all(one * second == other * first for first, second in others):
            del self._seen[micro_batch]
            return None
        return pair

    def _compare(self, runs: TrialRuns, pair: tuple[int, int]) -> None:
        """Compare two micro-batches with both together."""
        sizes = [self.sizes[index] for index in pair]
        received = [self._seen[index] for index in pair]
        parts = [runs.batch.micro_batches[index] for index in pair]
        both_parts = self.join(pair)
        singles = [runs.loss(*each) for each in zip(pair, parts, received, strict=True)]
        self.most = self._rounding(runs.stages, singles[-1])
        one, other = map(float, singles)
        self.rounding = self._closest(runs, pair[0], received[0], sizes[0], one * (1 + self.summed))
        predicted = {name: self._predicted(amounts, pair, (one, other)) for name, amounts in self.amounts.items()}
        expected = next(iter(predicted.values()))
        if expected is None:
            return
        together: list[float] = []
        failed: Exception = UnlikeError()
        for way in _ways(received, sizes, packed_orders(parts)):
            try:
                both, *others = [float(runs.loss(pair[0], both_parts, inbound)) for inbound in way]
            except Exception as error:
                failed = error
                continue
            if any(other != both for other in others):
                continue
            together.append(both)
            fitting = [name for name, each in predicted.items() if each is None or close(each, both, self.rounding)]
            if fitting:
                self.agreed = True
                self.amounts = {name: self.amounts[name] for name in fitting}
                return
        if not together:
            raise failed
        if all(map(math.isfinite, together)):
            if runs.drew and not runs.whole:
                # a step that leaves layers out at random asks whether the module is in training
                self._compare(replace(runs, whole=True, drew=False), pair)
                return
            if runs.are_random(pair[0], parts[0], received[0], lambda _, result: self._agrees(result, one)):
                raise _DiffersError
            self.differs = (pair, expected, together[0])

    def _predicted(self, amounts: Sequence[float], pair: tuple[int, int], losses: Sequence[float]) -> float | None:
        """What the loss of both together is, if micro-batches count these amounts; ``None`` if neither counts."""
        if self.summed:
            return sum(losses)
        weights = [amounts[index] for index in pair]
        # what counts nothing may be NaN
        total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
        return total / sum(weights) if sum(weights) else None

    def _agrees(self, result: Any, loss: float) -> bool:
        found = float(loss_of(result))
        return close(found, loss, self.rounding) or (math.isnan(found) and math.isnan(loss))

    def _closest(self, runs: TrialRuns, index: int, inbound: Crossing | None, size: int, loss: float) -> float:
        """The largest difference that it makes, as one micro-batch shows, put together with itself, in float32."""
        if self.most != _ROUNDING[torch.float32]:
            return self.most
        try:
            packed = packed_orders([runs.batch.micro_batches[index]] * 2)
            both, ways = self.join((index, index)), readings([inbound] * 2, [size] * 2, packed=packed)
            noise = min(abs(float(runs.loss(index, both, each)) - loss) / (1 + abs(loss)) for each in ways)
        except Exception:  # it cannot be put together with itself
            return self.most
        return min(self.most, max(_LEAST, TIMES * noise)) if noise < self.most else self.most

    def _rounding(self, stages: Stages, loss: Tensor) -> float:
        """The largest difference that rounding can make, by the coarsest numbers that take part."""
        received = [tensor for inbound in self._seen.values() if inbound for tensor in inbound.tensors.values()]
        tensors = [loss, *received, *stages.interceptor.module.parameters()]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} | {self.autocast or loss.dtype}
        reduced = loss.device.type != "cpu" and torch.float32 in dtypes
        return max([_REDUCED * reduced, *(_ROUNDING.get(dtype, 2e-3) for dtype in dtypes)])


def _ways(
    received: Sequence[Crossing | None], sizes: Sequence[int], packed: PackedOrders
) -> Iterable[Sequence[Crossing | None]]:
    """What the stage would receive for both together, in all ways that it may be meant.

    A router's loss that the step only logs is one for all samples: nobody knows what it is for both micro-batches, but
    the loss is the same with that of the one and with that of the other. Each way has both of these then.
    """
    try:
        return [(inbound,) for inbound in readings(received, sizes, packed=packed)]
    except UnlikeError:
        return zip(*(readings(received, sizes, number, packed) for number in range(2)), strict=True)


def close(one: float, other: float, rounding: float) -> bool:
    """Whether two numbers differ by rounding alone."""
    return abs(one - other) <= rounding * (1 + abs(other))
