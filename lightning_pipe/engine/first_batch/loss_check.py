"""Is the loss of a batch the mean of its micro-batches' losses? Looked at in some batches, on the last stage.

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
from typing_extensions import override

from lightning_pipe.engine.batch import Batch, BatchObserver, Inbound
from lightning_pipe.engine.first_batch.both_together import UnlikeError, readings
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.recompute import recomputing
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.torch_internals import DropoutNd, NormBase

if TYPE_CHECKING:
    from lightning_pipe.engine.stage import Stages

_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""How far losses may differ that are equal but for rounding, relative to 1 + their size."""
_REDUCED = 5e-4
"""The same for float32 on devices that multiply matrices with fewer bits."""
_SEEDS = 8

_local = threading.local()


class _RandomError(Exception):
    """The loss differs from run to run."""


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
class LossCheck(BatchObserver):
    """Compares the losses of two micro-batches that come to the last stage with the loss of both together.

    Two may agree by chance (as many tokens in both), so up to three pairs of a batch are compared. The check only
    looks: what the step changes, logs or draws is put back, and whatever goes wrong ends the check alone. Dropout and
    batch norm are off, and a loss that is random nevertheless is not judged. Compiled code is left alone: another size
    and mode would have it compiled anew.

    Args:
        amounts: what each micro-batch counts.
        sizes: samples of each micro-batch.
        join: puts micro-batches together, given their numbers.
        autocast: the type of numbers that the step computes with by itself; ``None``: that of its tensors.
        summed: whether the loss of both is expected to be the sum of their losses, not the mean.
        values: the numbers that the last run logged or returned, by name, to be compared in the same way.
        pairs: how many pairs are compared at most.

    Attributes:
        differs: the numbers of two micro-batches, what their losses make, and the loss of both together, if these are
            not the same.
        agreed: whether a pair was compared, and agreed.
        reason: why a pair could not be compared, in words.
        compared: for each of the values: what they were for one micro-batch, another one, and both together, with the
            share of the first. One entry for each pair that agreed.
        rounding: the largest difference that rounding can make.
    """

    amounts: Sequence[float]
    sizes: Sequence[int]
    join: Callable[[tuple[int, int]], Any]
    autocast: torch.dtype | None = None
    summed: bool = False
    values: Callable[[], dict[Any, float]] = dict
    pairs: int = 3
    differs: tuple[tuple[int, int], float, float] | None = None
    agreed: bool = False
    reason: str | None = None
    compared: dict[Any, list[tuple[float, float, float, float]]] = field(default_factory=dict)
    rounding: float = 0.0
    _seen: dict[int, Inbound | None] = field(default_factory=dict)
    _tried: int = 0

    @override
    def before_stage(self, stages: Stages, stage: int, micro_batch: int, batch: Batch, inbound: Inbound | None) -> None:
        """A micro-batch comes to a stage; with every second one on the last stage the check is made."""
        if not stages.layers[stage].last or self._tried >= self.pairs or stages.interceptor.compiled:
            return
        # the step may change in place what it receives
        self._seen[micro_batch] = inbound and (inbound[0], inbound[0].copies(inbound[1]))
        if len(self._seen) < 2:
            return
        self._tried += 1
        pair = (min(self._seen), max(self._seen))
        with _alone(), recomputing(), torch.no_grad(), _attributes(stages), stages.buffers.restored():
            try:
                self._compare(_Runs(stages, stage, batch), pair)
            except UnlikeError:
                self.reason = "layers get tensors of which two micro-batches' cannot be put together"
            except _RandomError:
                self.reason = "it is random, though dropout is off"
            except CutError:
                self.reason = "with two micro-batches together the step takes another way through its code"
            except Exception as error:  # whatever a step may raise that was not made for this
                lines = str(error).strip().splitlines() or [""]
                self.reason = f"two micro-batches together raise {type(error).__name__}: {lines[0]}"
        if self.differs is not None:
            self._tried = self.pairs
        self._seen.clear()

    def _compare(self, runs: _Runs, pair: tuple[int, int]) -> None:
        """Compare two micro-batches with both together."""
        sizes, shares = [self.sizes[index] for index in pair], [self.amounts[index] for index in pair]
        received = [self._seen[index] for index in pair]
        parts = [runs.batch.micro_batches[index] for index in pair]
        both_parts = self.join(pair)
        singles: list[tuple[float, dict[Any, float]]] = []
        for index, part, inbound in zip(pair, parts, received, strict=True):
            loss = runs.loss(index, part, inbound)
            singles.append((float(loss), self.values()))
        self.rounding = self._rounding(runs.stages, loss)
        one, other = (value for value, _ in singles)
        if not sum(shares) or not math.isfinite(one + other):
            return
        share = shares[0] / sum(shares)
        expected = one + other if self.summed else share * one + (1 - share) * other
        together: list[float] = []
        failed: Exception | None = None
        for inbound in readings(received, sizes):
            try:
                together.append(float(runs.loss(pair[0], both_parts, inbound)))
            except Exception as error:
                failed = error
                continue
            if close(expected, together[-1], self.rounding):
                self.agreed = True
                self._note(share, singles[0][1], singles[1][1], self.values())
                return
        if not together:
            raise failed or UnlikeError
        if all(map(math.isfinite, together)):
            if runs.drew and not runs.whole:
                # a step that leaves layers out at random asks whether the module is in training
                self._compare(replace(runs, whole=True), pair)
                return
            if runs.are_random(pair[0], parts[0], received[0], one, self.rounding):
                raise _RandomError
            self.differs = (pair, expected, together[0])

    def _note(self, share: float, one: dict[Any, float], other: dict[Any, float], both: dict[Any, float]) -> None:
        for name in [name for name in one if name in other and name in both]:
            self.compared.setdefault(name, []).append((one[name], other[name], both[name], share))

    def _rounding(self, stages: Stages, loss: Tensor) -> float:
        """The largest difference that rounding can make, by the coarsest numbers that take part."""
        received = [tensor for inbound in self._seen.values() if inbound for tensor in inbound[1].values()]
        tensors = [loss, *received, *stages.interceptor.module.parameters()]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} | {self.autocast or loss.dtype}
        reduced = loss.device.type != "cpu" and torch.float32 in dtypes
        return max([_REDUCED * reduced, *(_ROUNDING.get(dtype, 2e-3) for dtype in dtypes)])


def close(one: float, other: float, rounding: float) -> bool:
    """Whether two numbers differ by rounding alone."""
    return abs(one - other) <= rounding * (1 + abs(other))


@dataclass
class _Runs:
    """Runs of the step on the last stage of which nothing is to come.

    ``whole``: not only what computes is as in an evaluation there, but the whole module. ``drew``: whether a run has
    drawn random numbers there.
    """

    stages: Stages
    stage: int
    batch: Batch
    whole: bool = False
    drew: bool = False

    def loss(self, index: int, part: Any, inbound: Inbound | None, seed: int | None = None) -> Tensor:
        """The loss of a run.

        Args:
            index: the micro-batch that it draws the random numbers of: up to the stage's layers it goes the same way.
            part: the micro-batch.
            inbound: what the stage receives for it.
            seed: from the stage's first layer on, the micro-batch that it draws the random numbers of.
        """
        trial = replace(self.batch, micro_batches=[part] * (index + 1), training=False, results={})
        marks: list[Any] = []

        def begin() -> None:
            if seed is not None:
                trial.streams.seed_user_code(seed)
            marks.append(trial.streams.state())

        with _not_random(self.stages, self.stage, begin, whole=self.whole):
            loss = self.stages.trial(self.stage, index, trial, inbound)
        self.drew |= not marks or marks[-1] != trial.streams.state()
        return loss

    def are_random(self, index: int, part: Any, inbound: Inbound | None, loss: float, rounding: float) -> bool:
        """Whether a loss is another one with other random numbers: from the start, or from this stage's layers on.

        A layer that is left out with a small probability shows in some runs alone.
        """
        first = len(self.batch.micro_batches)
        for seed in range(first, first + _SEEDS):
            if not close(float(self.loss(index, part, inbound, seed)), loss, rounding):
                return True
            try:
                if not close(float(self.loss(seed, part, inbound)), loss, rounding):
                    return True
            except Exception:  # it takes another way to this stage
                return True
        return False


@contextmanager
def _attributes(stages: Stages) -> Iterator[None]:
    """What computes has the same attributes as before afterwards."""
    kept = Snapshot({str(number): part for number, part in enumerate(stages.interceptor.computing())})
    try:
        yield
    finally:
        kept.undo()


@contextmanager
def _not_random(stages: Stages, stage: int, then: Callable[[], None], *, whole: bool = False) -> Iterator[None]:
    """What the stage computes is as in an evaluation; up to there the step must go the way that it has gone.

    Args:
        stages: the stages of this rank.
        stage: the one that runs.
        then: called where the stage's layers begin.
        whole: whether all of the module is, and not only what computes.
    """
    module, layers = stages.interceptor.module, stages.interceptor.layers
    quiet: list[nn.Module] = [part for part in module.modules() if whole or isinstance(part, DropoutNd | NormBase)]
    quiet += stages.interceptor.computing()
    before = [part.training for part in quiet]

    def silence() -> None:
        for part in quiet:
            part.training = False

    def begin(*_: Any) -> None:
        silence()
        then()

    start = stages.layers[stage].layers.start
    hook = layers[start].register_forward_pre_hook(begin)
    try:
        if start == 0:
            silence()
        yield
    finally:
        hook.remove()
        for part, training in zip(quiet, before, strict=True):
            part.training = training
