"""The micro-batches of a batch, with the weight of each in losses and logged values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_pipe.batches.split_batch import SplitBatch, samples, split
from lightning_pipe.batches.suspects import check_no_causal_mask
from lightning_pipe.config import Auto, micro_batch_count, micro_batch_sizes, micro_batch_weights
from lightning_pipe.errors import ConfigurationError

LossWeight = Callable[[Any], float] | Literal["sum"]


@dataclass(frozen=True)
class MicroBatches:
    """A batch that is split into micro-batches.

    Args:
        parts: the micro-batches.
        sizes: samples of each.
        amounts: what each counts in means over the batch, before the batches of other replicas are known.
        summed: whether the batch's loss is the sum of the losses of its micro-batches, and no mean.
        own: whether the user's function has split the batch.
        batch: the batch.
        uncut: why it is left whole, if how to cut it is not clear.
        candidates: what each may count, by what the loss may be a mean over; empty if that makes no difference.
    """

    parts: list[Any]
    sizes: list[int]
    amounts: list[float]
    summed: bool = False
    own: bool = False
    batch: Any = None
    uncut: str = ""
    candidates: Mapping[str, list[float]] = field(default_factory=dict)

    def together(self, indices: Sequence[int]) -> Any:
        """Some of the micro-batches as one.

        Args:
            indices: their numbers, which follow each other, or those of all.

        Raises:
            ConfigurationError: how to put them together is not clear.
        """
        first, last = indices[0], indices[-1] + 1
        if list(indices) == list(range(len(self.parts))):
            return self.batch
        if self.own or list(indices) != list(range(first, last)):
            raise ConfigurationError("these micro-batches cannot be put together again")
        # cut in one piece, by whatever cuts it
        around = [sum(self.sizes[:first]), sum(self.sizes[first:last]), sum(self.sizes[last:])]
        return split(self.batch, [size for size in around if size])[first > 0]

    @property
    def shares(self) -> list[float]:
        """The share of each micro-batch in this batch; they add up to 1. Where none counts, by samples."""
        return micro_batch_weights(self.amounts if any(self.amounts) else self.sizes)

    def loss(self, losses: Sequence[Any]) -> Any:
        """The loss of the batch, from those of its micro-batches: numbers, or tensors of one value."""
        weights = [1.0] * len(self.parts) if self.summed else self.shares
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)

    def weights(self, total: float) -> list[float]:
        """The factor of each micro-batch's loss, if the batches of all replicas together count ``total``."""
        return [1.0] * len(self.parts) if self.summed else micro_batch_weights(self.amounts, total)


def divide_batch(
    batch: Any,
    ranks: int,
    micro_batches: int | Auto = "auto",
    split_batch: SplitBatch | None = None,
    loss_weight: LossWeight | None = None,
    least: int = 1,
) -> MicroBatches:
    """Split a batch as the options of the strategy say.

    Args:
        batch: what the DataLoader has yielded.
        ranks: ranks in one pipeline.
        micro_batches: how many; a batch of fewer samples is split into fewer.
        split_batch: the user's function that splits batches.
        loss_weight: what the loss of a micro-batch counts; by default its samples. ``"sum"``: losses are added.
        least: samples that every micro-batch needs; a short batch is split into fewer micro-batches for that.

    Raises:
        ConfigurationError: how to split the batch, or what a part of it counts, is not clear.

    Example:
        >>> import torch
        >>> split_in_two = divide_batch({"x": torch.zeros(5, 2)}, ranks=1, micro_batches=2)
        >>> split_in_two.sizes, split_in_two.shares
        ([3, 2], [0.6, 0.4])
    """
    if split_batch is not None:
        parts = list(split_batch(batch, _wanted(batch, ranks, micro_batches, least)))
        if not parts:
            raise ConfigurationError("split_batch returned no micro-batches.", hint="Return a list with at least one.")
        sizes = _sizes(batch, parts, needed=loss_weight is None)
    elif micro_batches == 1:
        parts, sizes = [batch], _sizes(batch, [batch], needed=False)
    else:
        length = samples(batch)
        sizes = micro_batch_sizes(length, micro_batch_count(length, ranks, micro_batches, least))
        if len(sizes) > 1:
            check_no_causal_mask(batch, length)
        parts = split(batch, sizes)
    summed = loss_weight == "sum"
    amounts = [float(loss_weight(part)) for part in parts] if callable(loss_weight) else [*map(float, sizes)]
    return MicroBatches(parts, sizes, amounts, summed, split_batch is not None, batch)


def _wanted(batch: Any, ranks: int, micro_batches: int | Auto, least: int) -> int:
    """How many micro-batches the user's function is asked for."""
    try:
        return micro_batch_count(samples(batch), ranks, micro_batches, least)
    except ConfigurationError:
        return 4 * ranks if micro_batches == "auto" else micro_batches


def _sizes(batch: Any, parts: list[Any], needed: bool) -> list[int]:
    """Samples of every micro-batch; equal ones where they are not needed and cannot be counted."""
    try:
        sizes = [samples(part) for part in parts]
        if sum(sizes) == samples(batch):
            return sizes
        found = f"along the first dimension they have {sizes}, which the batch has not."
    except ConfigurationError as error:
        found = error.message
    if needed and len(parts) > 1:
        raise ConfigurationError(
            f"The number of samples in a micro-batch from split_batch is not clear: {found}",
            hint="Say what each counts: PipeStrategy(loss_weight=lambda micro_batch: …). Or leave split_batch out: "
            "micro_batches=1 runs the batch whole, which is exact.",
        )
    return [1] * len(parts)
