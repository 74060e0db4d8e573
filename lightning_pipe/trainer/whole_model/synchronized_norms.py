"""``Trainer(sync_batchnorm=True)``: batch norm over the replicas, each stage with its copies in other pipelines."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.sync_batchnorm import synchronize, synchronized_norms
from lightning_pipe.schedules import Family
from lightning_pipe.trainer.world import World


def synchronize_norms(
    module: pl.LightningModule, family: Family, device: torch.device, world: World, *, every: bool
) -> Callable[[], None]:
    """Synchronize batch norms; returns a function that undoes it.

    Args:
        module: the LightningModule.
        family: the schedule family.
        device: where this process computes.
        world: the processes.
        every: whether all batch norms are meant, or those that the user has made synchronized ones.

    Raises:
        ConfigurationError: they would wait for each other where they cannot; names the schedule or the device.
    """
    together = world.replicas is not None and any(True for _ in synchronized_norms(module, every=every))
    what = ""
    if family.pipes > 1 and (every or together):
        what, why = f"schedule {family.label}", "the copies of a stage run at different times"
    elif together and device.type != "cuda":
        what, why = f"device {device}", "torch's SyncBatchNorm needs GPUs"
    if what:
        raise ConfigurationError(
            f"Synchronized batch norm (sync_batchnorm=True) and {what} do not go together: {why}.",
            hint="Use plain batch norm: with deferred_batch_norm=True all copies and replicas share statistics.",
        )
    if world.layout.world_size == 1:
        return lambda: None
    return synchronize(module, world.replicas, every=every)
