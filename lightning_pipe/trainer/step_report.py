"""What the ranks with the last stage report about a batch to the other ranks of their pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.contents import Change
from lightning_pipe.text import memory
from lightning_pipe.torch_internals import tree_leaves
from lightning_pipe.trainer.broadcasts import REPORTS, Broadcast, from_ranks
from lightning_pipe.trainer.whole_model.logging import Merged, single_value
from lightning_pipe.transport.nonblocking_broadcast import NonBlockingBroadcast
from lightning_pipe.warn_once import WarnOnce

OUTPUT_LIMIT = 64 << 20
"""Bytes up to which the outputs of a step are sent to the ranks without the last stage."""


@dataclass
class StepReport:
    """What one rank with the last stage reports about a batch.

    Args:
        outputs: what the step returned for each micro-batch; ``None`` if it is too large to be sent.
        logged: what the step logged.
        changes: what the step changed in the attributes of the LightningModule.
        stop: whether this rank has been asked to stop the training.
        repeats: whether the step has come back to layers of an earlier stage, and ended there.
        hooks: those on modules that the step has left, by their places among all that it has registered.
    """

    outputs: dict[int, Any] | None
    logged: list[Merged]
    changes: list[Change]
    stop: bool
    repeats: bool = False
    hooks: tuple[int, ...] = ()


class ReportExchange:
    """Brings the reports of the ranks with the last stage to all ranks of the pipeline.

    Args:
        pipeline: the module over the ranks.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._channel = NonBlockingBroadcast(pipeline.transport, ahead=2, number=REPORTS)
        self._warn = WarnOnce()

    def share(
        self,
        report: StepReport | None,
        ranks: Sequence[int],
        broadcast: Broadcast | None = None,
        *,
        send_outputs: bool = True,
    ) -> list[StepReport]:
        """The reports of the ranks that complete the steps. Collective over the pipeline.

        Args:
            report: this rank's report; ``None`` on any other rank.
            ranks: those that complete the steps.
            broadcast: sends objects within the pipeline; by default the others wait for those that report.
            send_outputs: whether ranks without the last stage get what the step returned.
        """
        # one process shares with nobody: there the size does not matter
        sent = report
        if report is not None and len(self._pipeline.pipeline_members) > 1:
            sent = self._within_limit(report) if send_outputs else replace(report, outputs=None)
        reports = from_ranks(self._pipeline, ranks, sent, broadcast or self._send)
        self._channel.end_call()
        # hooks on this rank get the outputs whole, even those that are too large to be sent
        return reports if report is None else [report if each is sent else each for each in reports]

    def _send(self, report: Any, source: int) -> Any:
        return self._channel.share(report, source, self._pipeline.pipeline_members)

    def _within_limit(self, report: StepReport) -> StepReport:
        size = sum(leaf.nbytes for leaf in tree_leaves(report.outputs) if isinstance(leaf, Tensor))
        if size <= OUTPUT_LIMIT:
            return report
        self._warn(
            "outputs",
            f"The step returns {memory(size)}, more than the {memory(OUTPUT_LIMIT)} that are sent to ranks without the "
            "loss: hooks there get the loss alone, or None.",
        )
        losses = {i: {"loss": output["loss"]} for i, output in (report.outputs or {}).items() if has_loss(output)}
        return replace(report, outputs=losses or None)


def known_outputs(reports: Sequence[StepReport]) -> dict[int, Any]:
    """What the step returned for each micro-batch, as far as it was sent to this rank."""
    return {index: output for report in reports for index, output in (report.outputs or {}).items()}


def has_loss(output: Any) -> bool:
    """Whether a step returned its loss among other things."""
    return isinstance(output, Mapping) and "loss" in output


def losses_of(outputs: Mapping[int, Any]) -> dict[int, float]:
    """The losses that a step returned, by micro-batch; an evaluation may return anything."""
    found = {index: single_value(each["loss"] if has_loss(each) else each) for index, each in outputs.items()}
    return {index: value.item() for index, value in found.items() if value is not None}
