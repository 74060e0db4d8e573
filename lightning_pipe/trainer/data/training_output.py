"""What ``training_step`` returns to Lightning for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.batches.joining import join
from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.engine.stage import loss_of
from lightning_pipe.engine.withheld_gradients import WithheldGradients
from lightning_pipe.trainer.whole_model.logging import to_host
from lightning_pipe.warn_once import WarnOnce

_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_pipe.")


def losses_on_host(outputs: Mapping[int, Any]) -> dict[int, Any]:
    """What the step returned, with the losses where they are added up: one transfer brings all of them there."""
    losses = [*map(loss_of, outputs.values())]
    host = [torch.tensor(value, dtype=loss.dtype) for value, loss in zip(to_host(losses), losses, strict=True)]
    return {
        index: {**output, "loss": loss} if isinstance(output, Mapping) else loss
        for (index, output), loss in zip(outputs.items(), host, strict=True)
    }


class TrainingOutput:
    """Joins what the step returned for micro-batches, with a loss whose backward pass returns the gradients.

    Args:
        module: the LightningModule.
        device: where the loss belongs.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._warn = WarnOnce()

    def of(self, outputs: Mapping[int, Any], micro_batches: MicroBatches, withheld: WithheldGradients) -> Any:
        """What ``training_step`` returns for a batch.

        Args:
            outputs: what the step returned for each micro-batch.
            micro_batches: the batch.
            withheld: the gradients that are due now.
        """
        values = [outputs[index] for index in sorted(outputs)]
        losses = [value["loss"] if isinstance(value, Mapping) else value for value in values]
        loss = withheld.loss(micro_batches.loss([float(one) for one in losses]), losses[0].dtype, self._device)
        if not isinstance(values[0], Mapping):
            return loss
        # everything but the loss, which alone leads to the gradients
        others = {i: {k: v for k, v in value.items() if k != "loss"} for i, value in enumerate(values)}
        joined = join(others, micro_batches.sizes, micro_batches.shares, self._warn_of_list)
        return {**joined, "loss": loss}

    def unknown(self, withheld: WithheldGradients) -> Any:
        """What ``training_step`` returns while no batch has finished: NaN."""
        return withheld.loss(float("nan"), torch.get_default_dtype(), self._device)

    def _warn_of_list(self, place: str) -> None:
        """Warn about an output that hooks get as a list, if there are hooks that may look at it."""
        trainer: Any = self._module.trainer
        users = [one for one in trainer.callbacks if not type(one).__module__.startswith(_LIGHTNING)]
        if is_overridden("on_train_batch_end", self._module) or any(
            is_overridden("on_train_batch_end", one, pl.Callback) for one in users
        ):
            self._warn(
                f"list {place}",
                f"training_step returns outputs{place}, of which it is not known how the values of micro-batches make "
                "that of the batch: on_train_batch_end gets a list with one entry for each micro-batch. Known are "
                "tensors and lists with one entry for each sample, means over samples, and what is the same for all.",
            )
