"""What the ranks with the last stage report about a batch to the other ranks of their pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_pipe.intercept.contents import Change
from lightning_pipe.text import memory
from lightning_pipe.torch_internals import tree_leaves
from lightning_pipe.trainer.whole_model.logging import Merged, single_value
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
        repeats: whether the step has ended since it has to run in another way.
        hooks: those on modules that the step has left, by their places among all that it has registered.
    """

    outputs: dict[int, Any] | None
    logged: list[Merged]
    changes: list[Change]
    stop: bool
    repeats: bool = False
    hooks: tuple[int, ...] = ()


def within_limit(report: StepReport, warn: WarnOnce) -> StepReport:
    """A report that is not too large to be sent: else it has the losses alone.

    Args:
        report: the report.
        warn: tells the user.
    """
    size = sum(leaf.nbytes for leaf in tree_leaves(report.outputs) if isinstance(leaf, Tensor))
    if size <= OUTPUT_LIMIT:
        return report
    warn(
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
