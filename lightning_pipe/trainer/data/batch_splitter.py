"""Splits the training batches of a run into micro-batches, alike on all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_pipe.batches.loss_checks import WEIGHTS, LossChecks, Verdict, remedy
from lightning_pipe.batches.micro_batches import MicroBatches, divide_batch
from lightning_pipe.batches.token_losses import TokenLosses
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.batch_norms import BATCH_NORM_SAMPLES, is_normalising
from lightning_pipe.torch_internals import BatchNorm
from lightning_pipe.warn_once import WarnOnce

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy

_WHOLE = "whole, with micro_batches=1: one rank computes at a time."


class BatchSplitter:
    """Splits batches as the options say, and looks at what it splits.

    All ranks of a pipeline see the same batches, and so come to the same micro-batches without messages.

    Args:
        pipeline: the LightningModule over the ranks.
        options: the strategy, which has the user's options.

    Attributes:
        options: as given.
        number: of micro-batches, as asked for.
        checks: the looks at losses.
    """

    def __init__(self, pipeline: Pipeline, options: PipeStrategy) -> None:
        self._pipeline, self._transport, self.options = pipeline, pipeline.transport, options
        self._ranks = pipeline.transport.topology.ranks
        # an asynchronous schedule is made for one number of micro-batches, since its optimizer steps as often
        self.number = (
            options.micro_batches if pipeline.asynchronous is None else pipeline.asynchronous.stream.micro_batches
        )
        self._norms = [part for part in pipeline.module.modules() if isinstance(part, BatchNorm)]
        self._largest, self._uncut = 0, ""
        # the user has said what counts, or batches are in flight, which nobody looks at
        told = options.loss_weight is not None or pipeline.asynchronous is not None
        self._tokens = None if told else TokenLosses()
        self.checks = LossChecks(compares=options.compare_losses, weighted=callable(options.loss_weight))
        self._warn = WarnOnce()

    def split(self, batch: Any) -> MicroBatches:
        """Split a batch.

        Batch norm normalises micro-batches, so ``"auto"`` keeps enough samples in each. On one sample with one value
        per channel it raises, as on one device. So a short batch is split into fewer micro-batches where more of them
        would have one sample each.
        """
        options, number = self.options, self.number
        if self._uncut:
            return self._whole(batch, self._uncut)
        full = self._batch_size or self._largest
        # a number that leaves one sample each in a full batch is the user's choice
        enough = BATCH_NORM_SAMPLES if number == "auto" else 2 if full >= 2 * number else 1
        least = enough if any(map(is_normalising, self._norms)) else 1
        try:
            split = divide_batch(batch, self._ranks, number, options.split_batch, options.loss_weight, least)
        except ConfigurationError as error:
            if not self._may_leave_whole:
                raise
            why = f"{error.message} So it runs {_WHOLE}"
            self._warn("whole", f"{why} {error.hint or ''}")
            return self._whole(batch, why)
        length = sum(split.sizes)
        self._largest = max(self._largest, length)
        if number != "auto" and options.split_batch is None and len(split.parts) < min(number, length):
            self._warn(
                "batch norm",
                f"A batch of {length} samples is cut into {len(split.parts)} micro-batches, not {number}: batch norm "
                "needs at least two samples in each. DataLoader(drop_last=True) leaves out a short last batch.",
            )
        return split if self._tokens is None else self._tokens.counted(split)

    def is_open(self, split: MicroBatches) -> bool:
        """Whether losses are to show, on any replica, what they are a mean over. Collective until that is known."""
        if self._tokens is None or len(self._tokens.left or ()) == 1:  # one candidate is left
            return False
        return self._transport.sum_over_replicas(len(split.candidates)) > 0

    def decided(self, split: MicroBatches, verdicts: Sequence[Verdict]) -> MicroBatches:
        """A batch as it is to run by what looks at it, and at those of other replicas, have shown.

        Args:
            split: the batch.
            verdicts: of all processes.

        Raises:
            ConfigurationError: the losses of replicas are means over different things.
        """
        found = next((each.difference for each in verdicts if each.difference), "")
        if found and self._may_leave_whole:
            self._uncut = f"{found} So batches run {_WHOLE}"
            self._warn("whole", f"{self._uncut} {remedy(summed=split.summed)}")
            return self._whole(split.batch, self._uncut)
        fitting = [each.fitting for each in verdicts if each.fitting is not None]
        if found or self._tokens is None or not fitting:
            return split
        if self._tokens.learn(fitting):
            why = "It does not show in the losses of this batch what they are a mean over. So it runs whole."
            self._warn("undecided", f"{why} {WEIGHTS}")
            return self._whole(split.batch, why)
        return self._tokens.counted(split)

    @property
    def _may_leave_whole(self) -> bool:
        """Whether a batch may be left whole: nobody has said into how many parts, or how, it is cut."""
        return self.number == "auto" and self.options.split_batch is None

    def _whole(self, batch: Any, why: str) -> MicroBatches:
        """A batch that is left whole: that is exact, and its ranks take turns."""
        whole = divide_batch(batch, self._ranks, 1, None, self.options.loss_weight)
        return replace(whole if self._tokens is None else self._tokens.counted(whole), uncut=why)

    def weights(self, micro_batches: MicroBatches) -> list[float]:
        """What the loss of each micro-batch counts in that of the batches of all replicas. Collective over these."""
        return micro_batches.weights(self._transport.sum_over_replicas(sum(micro_batches.amounts)))

    @property
    def _batch_size(self) -> int | None:
        """Samples of a full batch; ``None`` if the training loader does not know them."""
        module: Any = self._pipeline.module
        loader = module.trainer.train_dataloader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 0)
        return size if isinstance(size, int) and size else None
