"""What ``training_step`` returns to Lightning for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.batches.outputs import of_batch
from lightning_pipe.engine.withheld_gradients import WithheldGradients
from lightning_pipe.warn_once import WarnOnce

_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_pipe.")


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
        return of_batch(outputs, micro_batches, withheld, self._device, self._warn_of_list)

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
