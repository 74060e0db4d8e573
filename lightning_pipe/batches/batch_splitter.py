"""Splits the training batches of a run into micro-batches, alike on all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_pipe.batches.loss_checks import WEIGHTS, LossChecks, Verdict, remedy
from lightning_pipe.batches.micro_batches import LossWeight, MicroBatches, divide_batch
from lightning_pipe.batches.split_batch import SplitBatch
from lightning_pipe.batches.token_losses import TokenLosses
from lightning_pipe.config import Auto
from lightning_pipe.engine.batch import StepFunction
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.batch_norms import BATCH_NORM_SAMPLES, is_normalising
from lightning_pipe.torch_internals import BatchNorm
from lightning_pipe.warn_once import WarnOnce

_WHOLE = "whole, with micro_batches=1: one rank computes at a time."


class BatchSplitter:
    """Splits batches as the user's options say, and looks at some that it has split.

    All ranks of a pipeline see the same batches, and so come to the same micro-batches without messages.

    Args:
        pipeline: the module over the ranks.
        micro_batches: how many a batch is cut into.
        split_batch: the user's function that splits batches.
        loss_weight: what the loss of a micro-batch counts.
        compare_losses: whether losses of micro-batches are compared.
        full_batch: gives the samples of a full batch; 0 where nobody knows them.

    Attributes:
        number: of micro-batches, as asked for.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: int | Auto,
        split_batch: SplitBatch | None,
        loss_weight: LossWeight | None,
        *,
        compare_losses: bool,
        full_batch: Callable[[], int] = lambda: 0,
    ) -> None:
        self._pipeline, self._transport = pipeline, pipeline.transport
        # an asynchronous schedule is made for one number of micro-batches, since its optimizer steps as often
        self.number = micro_batches if pipeline.asynchronous is None else pipeline.asynchronous.stream.micro_batches
        self._split_batch, self._loss_weight, self._full_batch = split_batch, loss_weight, full_batch
        self._norms = [part for part in pipeline.module.modules() if isinstance(part, BatchNorm)]
        self._largest, self._uncut = 0, ""
        # the user has said what counts, or batches are in flight, which nobody looks at
        told = loss_weight is not None or pipeline.asynchronous is not None
        self._tokens = None if told else TokenLosses()
        self._checks = LossChecks(compares=compare_losses, weighted=callable(loss_weight))
        self._warn = WarnOnce()

    def split(self, batch: Any) -> MicroBatches:
        """Split a batch.

        Batch norm normalises micro-batches, so ``"auto"`` keeps enough samples in each. On one sample with one value
        per channel it raises, as on one device. So a short batch is split into fewer micro-batches where more of them
        would have one sample each.
        """
        number = self.number
        if self._uncut:
            return self._whole(batch, self._uncut)
        least = 1
        if any(map(is_normalising, self._norms)):
            full = self._full_batch() or self._largest
            # a number that leaves one sample each in a full batch is the user's choice
            least = BATCH_NORM_SAMPLES if number == "auto" else 2 if full >= 2 * number else 1
        try:
            split = self._divided(batch, number, least)
        except ConfigurationError as error:
            if not self._may_leave_whole:
                raise
            why = f"{error.message} So it runs {_WHOLE}"
            self._warn("whole", f"{why} {error.hint or ''}")
            return self._whole(batch, why)
        length = sum(split.sizes)
        self._largest = max(self._largest, length)
        if number != "auto" and self._split_batch is None and len(split.parts) < min(number, length):
            self._warn(
                "batch norm",
                f"A batch of {length} samples is cut into {len(split.parts)} micro-batches, not {number}: batch norm "
                "needs at least two samples in each. DataLoader(drop_last=True) leaves out a short last batch.",
            )
        return split if self._tokens is None else self._tokens.counted(split)

    def due(self, split: MicroBatches) -> int | None:
        """The number of a batch that `looked_at` is to see, the same on all ranks; ``None``: it runs as it is.

        Collective over the replicas until it is known what losses are means over.
        """
        if self.number == 1:
            return None
        number = self._checks.due(self._pipeline)
        if number is not None or self._open is None:
            return number
        # losses are to show, on any replica, what they are a mean over
        return 0 if any(self._transport.sum_over_replicas(len(split.candidates))) else None

    @property
    def _open(self) -> TokenLosses | None:
        """What is to find what losses are means over, as long as that is not known, alike on all ranks."""
        return None if self._tokens is None or len(self._tokens.left or ()) == 1 else self._tokens

    def looked_at(self, split: MicroBatches, step: StepFunction, seed: int, number: int) -> MicroBatches:
        """A batch as it is to run by what a look at it, and at those of other replicas, shows. Collective over all.

        Args:
            split: the batch.
            step: see `Pipeline.train`.
            seed: of its random streams.
            number: from `due`.

        Raises:
            ConfigurationError: it is not what its micro-batches make, or losses of replicas are means over different
                things.
        """
        verdict, transport = self._checks.look(self._pipeline, step, split, seed, number), self._transport
        verdicts: list[Verdict] = transport.all_gather_object(verdict, transport.topology.everyone)
        found = next((each.difference for each in verdicts if each.difference), "")
        if found and self._may_leave_whole:
            self._uncut = f"{found} So batches run {_WHOLE}"
            self._warn("whole", f"{self._uncut} {remedy(summed=split.summed)}")
            return self._whole(split.batch, self._uncut)
        fitting = [each.fitting for each in verdicts if each.fitting is not None]
        if fitting and not found and self._tokens is not None:
            if self._tokens.learn(fitting):
                why = "It does not show in the losses of this batch what they are a mean over. So it runs whole."
                self._warn("undecided", f"{why} {WEIGHTS}")
                return self._whole(split.batch, why)
            if (counted := self._tokens.counted(split)) is not split:
                return counted
        self._checks.accept(verdicts, summed=split.summed)
        return split

    def _divided(self, batch: Any, number: int | Auto, least: int = 1) -> MicroBatches:
        ranks = self._transport.topology.ranks
        return divide_batch(batch, ranks, number, self._split_batch, self._loss_weight, least)

    @property
    def _may_leave_whole(self) -> bool:
        """Whether a batch may be left whole: nobody has said into how many parts, or how, it is cut."""
        return self.number == "auto" and self._split_batch is None

    def _whole(self, batch: Any, why: str) -> MicroBatches:
        """A batch that is left whole: that is exact, and its ranks take turns."""
        whole = self._divided(batch, 1)
        return replace(whole if self._tokens is None else self._tokens.counted(whole), uncut=why)

    def weights(self, micro_batches: MicroBatches) -> list[float]:
        """What the loss of each micro-batch counts in that of the batches of all replicas. Collective over these.

        Raises:
            ConfigurationError: it is not known what losses are means over, and replicas have different shares of it.
        """
        spread = (0.0, 0.0, 0.0) if self._open is None else self._open.spread
        total, replicas, ratios, squares = self._transport.sum_over_replicas(sum(micro_batches.amounts), *spread)
        if replicas * squares - ratios**2 > 1e-9 * squares:
            raise ConfigurationError(
                "Replicas have different numbers of labels that are not -100, and losses do not show whether they are "
                "means over these or over samples.",
                hint="Say what a batch counts: PipeStrategy(loss_weight=lambda batch: (batch['labels'] != -100).sum())"
                ", or loss_weight=lambda batch: len(batch['labels']) for means over samples.",
            )
        return micro_batches.weights(total)
