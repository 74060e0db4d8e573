"""What the ranks with the last stage report about a batch to the other ranks of their pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipe.intercept.contents import Change
from lightning_pipe.trainer.whole_model.logging import Merged, single_value


@dataclass
class StepReport:
    """What one rank with the last stage reports about a batch.

    Args:
        outputs: what the step returned for each micro-batch; ``None`` if nobody looks at it.
        logged: what the step logged.
        changes: what the step changed in the attributes of the LightningModule.
        asked: whether this rank was asked to stop the training, and by signals to end, and to save and be requeued.
        repeats: whether the step has ended since it has to run in another way.
        hooks: those on modules that the step has left, by their places among all that it has registered.
    """

    outputs: dict[int, Any] | None
    logged: list[Merged]
    changes: list[Change]
    asked: list[bool]
    repeats: bool = False
    hooks: tuple[int, ...] = ()


def known_outputs(reports: Sequence[StepReport]) -> dict[int, Any]:
    """What the step returned for each micro-batch, as far as it was sent to this rank."""
    return {index: output for report in reports for index, output in (report.outputs or {}).items()}


def losses_of(outputs: Mapping[int, Any]) -> dict[int, float]:
    """The losses that a step returned, by micro-batch; an evaluation may return anything."""
    given = {
        index: each["loss"] if isinstance(each, Mapping) and "loss" in each else each for index, each in outputs.items()
    }
    found = {index: single_value(each) for index, each in given.items()}
    return {index: value.item() for index, value in found.items() if value is not None}
