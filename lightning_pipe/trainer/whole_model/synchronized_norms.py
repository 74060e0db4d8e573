"""``Trainer(sync_batchnorm=True)``: batch norm over the replicas, each stage with its copies in other pipelines."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch

from lightning_pipe.parameters.sync_batchnorm import synchronize, synchronized_norms
from lightning_pipe.schedules import Family
from lightning_pipe.trainer.checks import check_synchronized_norms
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
        ConfigurationError: they would wait for each other where they cannot.
    """
    together = world.replicas is not None and any(True for _ in synchronized_norms(module, every=every))
    check_synchronized_norms(family, device, asked=every, together=together)
    if world.layout.world_size == 1:
        return lambda: None
    return synchronize(module, world.replicas, every=every)
