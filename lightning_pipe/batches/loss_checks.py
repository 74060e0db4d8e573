"""When the loss of a batch is compared with those of its micro-batches, and what the user is told about it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.batches.suspects import WHOLE
from lightning_pipe.engine.first_batch.loss_check import LossCheck
from lightning_pipe.engine.first_batch.mixing import MixingCheck

_CHECKED = frozenset((0, 1, 3, 7, 15, 31))
"""The batches that are checked: in the first ones there may be one class alone, or no padding."""

WEIGHTS = (
    "For a mean over something else than samples, or labels that are not -100, say what a micro-batch counts: "
    "PipeStrategy(loss_weight=lambda micro_batch: (micro_batch['labels'] != 0).sum()), say; a causal model predicts "
    "labels[:, 1:] alone. A sum needs PipeStrategy(loss_weight='sum')."
)
APART = (
    f"Samples that do not lie along the first dimension need PipeStrategy(split_batch=…). {WHOLE} A layer or "
    "a loss that compares samples with each other needs micro_batches=1, which is exact."
)
_WRONG = "Gradients differ accordingly from those of one device."


class Difference(NamedTuple):
    """That a batch is not what its micro-batches make.

    Args:
        why: with numbers.
        remedy: what helps.
        in_loss: whether it is seen in the loss; samples that meet before it explain that, too.
    """

    why: str
    remedy: str
    in_loss: bool


class LossChecks:
    """The loss checks of a run: for some of its first batches that have several micro-batches.

    Args:
        weighted: whether the user's function says what a micro-batch counts: nothing is said about the loss then.
        replica: the number of this pipeline among those side by side.

    Attributes:
        repeats: whether a batch whose samples depend on each other runs again, whole: then nothing is warned of.
    """

    repeats = False

    def __init__(self, *, weighted: bool, replica: int = 0) -> None:
        self._weighted, self._replica = weighted, replica
        self._batches = 0
        self._mixing: Difference | None = None
        self._told = set[str]()  # what has been warned of

    def begin(self, micro_batches: MicroBatches) -> LossCheck | None:
        """The check of the next batch; ``None`` if that batch is not checked.

        Args:
            micro_batches: the batch.
        """
        if len(micro_batches.parts) == 1:
            return None
        number, self._batches = self._batches, self._batches + 1
        if (number not in _CHECKED or "loss" in self._told) and not micro_batches.compared:
            return None
        pairs, some = (len(micro_batches.parts), 3) if number == 0 else (1, 1)
        return LossCheck(
            micro_batches.candidates or {"": micro_batches.amounts},
            micro_batches.sizes,
            micro_batches.together,
            micro_batches.summed,
            pairs=pairs,
            mixing=MixingCheck(micro_batches.sizes, micro_batches.together, self._tell_mixing, some),
        )

    def _tell_mixing(self, layers: str, sizes: Sequence[int]) -> None:
        found, kind = (_mixing(layers, sizes), "samples") if sizes else (None, "unseen samples")
        if found and self.repeats:
            self._mixing = found
        elif self._replica == 0 and kind not in self._told and (sizes or not self._weighted):
            self._told.add(kind)
            # not by rank_zero_warn: process 0 need not have the stage
            warnings.warn(f"{found.why} {_WRONG} {found.remedy}" if found else _unchecked_layers(layers), stacklevel=2)

    def difference(self, check: LossCheck | None) -> Difference | None:
        """That a batch is not what its micro-batches make, as seen on this rank; or nothing."""
        if self._mixing or check is None or check.differs is None or self._weighted:
            return self._mixing
        (one, other), expected, both = check.differs
        sizes = f"micro-batches of {check.sizes[one]} and {check.sizes[other]} samples"
        together = f"the same samples together have {both:.7g} (without dropout)."
        if check.summed:
            why = f"The loss is not a sum over the samples, as loss_weight='sum' says: losses of {sizes} add up to"
            remedy = "For a mean leave loss_weight out, or say what a micro-batch counts."
        else:
            why, remedy = f"The loss is not a mean over the samples: {sizes} have a mean loss of", f"{WEIGHTS} {APART}"
        return Difference(f"{why} {expected:.7g}, {together}", remedy, in_loss=True)

    def fitting(self, check: LossCheck | None) -> list[str] | None:
        """What the loss may be a mean over, as seen on this rank; ``None``: it knows nothing of it."""
        if check is None or "" in check.amounts or (check.reason is not None and not check.agreed):
            return None
        return [] if check.differs else [*check.amounts]

    def end(self, check: LossCheck | None) -> None:
        """Warn if the loss of the batch is not what the losses of its micro-batches make, or could not be compared.

        Args:
            check: the check of a batch that has run, on a rank with the last stage.
        """
        if check is None or self._weighted or "loss" in self._told:
            return
        if found := self.difference(check):
            self._told.add("loss")
            rank_zero_warn(f"{found.why} {_WRONG} {found.remedy}")
        elif check.reason is not None and not check.agreed and not self._told & {"unseen samples", "unseen loss"}:
            self._told.add("unseen loss")
            rank_zero_warn(_unchecked(check.reason, summed=check.summed))


def _mixing(layers: str, sizes: Sequence[int]) -> Difference:
    """Layers before the last stage do not keep samples apart."""
    one, other = sizes
    why = (
        f"What {layers}, and the code before them, make of a sample depends on the other samples in its micro-batch, "
        f"as with batch norm: for micro-batches of {one} and {other} samples it is not what it is for the same "
        "samples together (without dropout)."
    )
    return Difference(why, APART, in_loss=False)


def _unchecked_layers(layers: str) -> str:
    """The warning for layers before the last stage that could not be compared."""
    return (
        f"It was not checked whether {layers}, and the code before them, keep the samples of a micro-batch apart: two "
        "micro-batches cannot be put together there. If they do, all is well; micro_batches=1 runs batches whole."
    )


def _unchecked(reason: str, *, summed: bool) -> str:
    """The warning for a loss that could not be compared."""
    return (
        f"It was not checked whether the loss is a {'sum' if summed else 'mean'} over the samples: {reason}. If it is "
        "one, and every tensor with the length of the batch holds one entry for each sample, all is well; with "
        "PipeStrategy(loss_weight=lambda micro_batch: …), which says what a micro-batch counts, nothing is checked. "
        "State that goes from batch to batch (self.hidden) needs micro_batches=1."
    )
