"""When a batch is compared with what its micro-batches make of it, and what comes of that.

A sum, a mean over tokens that are not padding, class weights, losses or layers that compare samples with each other,
and tensors that are cut and hold no samples train with other gradients in micro-batches than in one piece, and nothing
would fail. So before some batches the step runs forward on two micro-batches, alone and together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from math import isfinite
from typing import NamedTuple

from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.batches.split_batch import twice
from lightning_pipe.batches.suspects import WHOLE
from lightning_pipe.engine.batch import StepFunction
from lightning_pipe.engine.first_batch.trial_losses import TIMES, TrialLosses, trial_losses
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.torch_internals import is_compiled
from lightning_pipe.warn_once import WarnOnce

_CHECKED = frozenset((0, 1, 3, 7, 15, 31))
"""The batches that are checked: in the first ones there may be one class alone, or no padding."""
_LEAST = 1e-6
"""Losses differ that are further apart than this, and than `TIMES` what a micro-batch twice is from itself."""

WEIGHTS = (
    "For a mean over something else than samples, or labels that are not -100, say what a micro-batch counts: "
    "PipeStrategy(loss_weight=lambda micro_batch: (micro_batch['labels'] != 0).sum()), say; a causal model predicts "
    "labels[:, 1:] alone. A sum needs PipeStrategy(loss_weight='sum'), a sum of different means micro_batches=1."
)
_AS_THEY_ARE = "With compare_losses=False nobody compares: what each micro-batch makes of its samples counts as it is."
APART = (
    f"Samples that do not lie along the first dimension need PipeStrategy(split_batch=…). {WHOLE} A layer or "
    "a loss that compares samples with each other needs micro_batches=1, which is exact."
)


class Verdict(NamedTuple):
    """What a look at a batch has shown.

    Args:
        difference: that the batch is not what its micro-batches make, with numbers; empty: that was not seen.
        unknown: why they could not be compared; empty: they were.
        fitting: what micro-batches count by each candidate that has predicted the losses, by all if none was compared;
            ``None``: the batch has no candidates.
    """

    difference: str = ""
    unknown: str = ""
    fitting: Mapping[str, list[float]] | None = None


class LossChecks:
    """The looks of a run at some of its first batches.

    Args:
        compares: whether there are any: else what micro-batches make of their samples counts as it is.
        weighted: whether the user's function says what a micro-batch counts, which need not be compared.
    """

    def __init__(self, *, compares: bool, weighted: bool) -> None:
        self._compares, self._weighted, self._batches = compares, weighted, 0
        self._warn = WarnOnce()

    def due(self, pipeline: Pipeline) -> int | None:
        """The number of the next batch if it is one of those that are looked at, the same on all ranks."""
        number, self._batches = self._batches, self._batches + 1
        busy = pipeline.asynchronous is not None and pipeline.asynchronous.in_flight
        return number if number in _CHECKED and self._compares and not busy else None

    def look(self, pipeline: Pipeline, step: StepFunction, batch: MicroBatches, seed: int, number: int) -> Verdict:
        """Compare some micro-batches of a batch, alone, with two of them together. Collective over all processes.

        Two may agree by chance (as many tokens in both, samples of one class), so all neighbours in the first batch are
        compared, and all that are to show what a loss is a mean over. Compiled code is left alone: another size would
        have it compiled anew.

        Args:
            pipeline: the divided module.
            step: see `Pipeline.train`.
            batch: the batch.
            seed: of its random streams.
            number: how many batches were before it.

        Raises:
            CutError: runs of the step change what is not put back, and compute with that.
        """
        unknown = Verdict(fitting=batch.candidates or None)
        if not self._compares or any(map(is_compiled, pipeline.module.modules())):
            return unknown
        with ExitStack() as changed:
            if (sharded := pipeline.reductions.sharded) is not None:  # its parameters are whole meanwhile
                sharded.hold(True)  # collective over the replicas, which may not all come to the runs
                changed.callback(sharded.hold, False)
            if len(batch.parts) == 1:
                return unknown
            groups = _groups(batch, number)
            singles = sorted({index for group in groups for index in group})
            try:
                runs = [*(batch.parts[index] for index in singles), *map(batch.together, groups)]
            except ConfigurationError as error:
                return unknown._replace(unknown=error.message)
            held: dict[int, Sequence[int]] = {}
            with suppress(ConfigurationError):  # nobody knows how: the noise is not measured
                runs.insert(len(singles), twice(batch.batch, batch.parts[singles[0]]))
                held = {len(singles): (0, 0), len(singles) + 1: [singles.index(index) for index in groups[0]]}
            for evaluating in (False, True):
                found = trial_losses(pipeline, step, runs, seed, evaluating=evaluating, together=held)
                if found.reason is not None:
                    return unknown._replace(unknown=found.reason)
                verdict = _judged(batch, dict(zip(singles, found.losses, strict=False)), groups, found)
                if verdict.difference:
                    again = trial_losses(pipeline, step, runs[:1], seed, evaluating=evaluating).losses
                    _check_alike(found.losses[0], again, found.rounding)
                # a step that leaves layers out at random asks whether the module is in training
                if not (verdict.difference and found.drew):
                    return verdict
        return unknown._replace(unknown="it depends on random numbers, though dropout is off")

    def accept(self, verdicts: Sequence[Verdict], *, summed: bool) -> None:
        """Let a batch run in micro-batches after looks at it, those of all replicas.

        Raises:
            ConfigurationError: the batch is not what its micro-batches make.
        """
        verdict = min(verdicts, key=lambda each: (not each.difference, not each.unknown))
        if verdict.difference:
            raise ConfigurationError(
                f"{verdict.difference} Gradients would differ accordingly from those of one device.",
                hint=f"{remedy(summed=summed)} {_AS_THEY_ARE}",
            )
        if verdict.unknown and not self._weighted:
            what = "sum" if summed else "mean"
            self._warn(
                "unknown",
                f"It was not checked whether the loss is a {what} over the samples: {verdict.unknown}. If it is one, "
                "and every tensor with the length of the batch holds one entry for each sample, all is well. State "
                f"that goes from batch to batch (self.hidden) needs micro_batches=1. {_AS_THEY_ARE}",
            )


def remedy(*, summed: bool) -> str:
    """What helps where a batch is not what its micro-batches make."""
    return "For a mean leave loss_weight out, or say what a micro-batch counts." if summed else f"{WEIGHTS} {APART}"


def _check_alike(first: float, again: Sequence[float], rounding: float) -> None:
    """Refuse a step that computes something else of a micro-batch when it runs again; it may have failed then."""
    if isfinite(first) and not all(abs(first - last) <= rounding * (1 + abs(first)) for last in again):
        raise CutError(
            f"The step has a loss of {first:.7g} for a micro-batch, and of {again[0]:.7g} when it runs for it again: "
            "it changes something that it computes with, and that ranks, which run it several times, do not put back "
            "(a global, a class, a file, a clock).",
            hint="Change it in a hook, such as on_train_batch_start.",
        )


def _groups(batch: MicroBatches, number: int) -> list[range]:
    """The numbers of the micro-batches that are put together: all where nobody knows how to put together two."""
    count = len(batch.parts)
    groups = [range(count)] if batch.own else [range(first, first + 2) for first in range(count - 1)]
    return groups if number == 0 or batch.candidates else [groups[number % len(groups)]]


def _judged(
    batch: MicroBatches, single: Mapping[int, float], groups: Sequence[Sequence[int]], found: TrialLosses
) -> Verdict:
    """What the losses of single micro-batches, and of groups of them together, show."""
    fitting = {**batch.candidates} or {"": batch.amounts}
    together, noise = found.losses[len(single) :], found.rounding
    if len(together) > len(groups):
        once = next(iter(single.values())) * (1 + batch.summed)
        noise = abs(together.pop(0) - once) / (1 + abs(once))
    # noise need not show that losses, and a mean of them, are rounded to numbers of their type
    rounding = max(found.steps, min(found.rounding, max(_LEAST, TIMES * noise)))
    for group, both in zip(groups, together, strict=True):
        alone = [single[index] for index in group]
        predicted = {
            name: sum(alone) if batch.summed else _mean(alone, [amounts[index] for index in group])
            for name, amounts in fitting.items()
        }
        bound = rounding * (1 + abs(both))
        left = {name: fitting[name] for name, each in predicted.items() if each is None or abs(each - both) <= bound}
        if not left and isfinite(both):
            sizes = " and ".join(str(batch.sizes[index]) for index in group)
            what, whose = ("sum", "add up to") if batch.summed else ("mean", "have a mean loss of")
            labels = ", nor over labels that are not -100" if batch.candidates else ""
            return Verdict(
                f"The loss is not a {what} over the samples{labels}, or depends on which samples are together: "
                f"micro-batches of {sizes} samples {whose} {next(iter(predicted.values())):.7g}, the same samples "
                f"together have {both:.7g} (without dropout).",
                fitting={} if batch.candidates else None,
            )
        fitting = left or fitting
    fits = fitting if batch.candidates else None
    if found.apart:
        return Verdict(
            "What layers compute depends on which samples are together: what leaves a stage for two micro-batches "
            f"together is {found.apart:.1g} of its size away from what leaves for each (without dropout), though the "
            "losses are alike.",
            fitting=fits,
        )
    return Verdict(fitting=fits)


def _mean(losses: Sequence[float], weights: Sequence[float]) -> float | None:
    """``None`` if none of them counts; what counts nothing may be NaN."""
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
    return total / sum(weights) if sum(weights) else None
