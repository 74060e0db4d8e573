"""What looks at batches besides the steps: hooks of the user's, and some callbacks of Lightning's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter, ThroughputMonitor
from lightning.pytorch.utilities.model_helpers import is_overridden

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOOKING = (BasePredictionWriter, ThroughputMonitor)
"""Callbacks that give batches to functions of the user's."""


def hooks_between(module: pl.LightningModule, name: str) -> Iterator[str]:
    """The hooks that are called for every batch of a method and are not Lightning's own.

    Args:
        module: the LightningModule, with its Trainer.
        name: the method that runs a batch.
    """
    trainer: Any = module.trainer
    stage = "train" if name == "training_step" else name.removesuffix("_step")
    for hook in (f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
        for owner in (module, *trainer.callbacks):
            if not _is_lightnings(getattr(owner, hook)):
                yield f"{type(owner).__name__}.{hook}"
    for hook in _TRANSFERS:
        for owner in (module, trainer.datamodule):
            if owner is not None and is_overridden(hook, owner):
                yield f"{type(owner).__name__}.{hook}"


def are_looked_at(module: pl.LightningModule, name: str) -> bool:
    """Whether anything on this rank but the step may look at the batches of a method."""
    trainer: Any = module.trainer
    return next(hooks_between(module, name), None) is not None or any(
        isinstance(callback, _LOOKING) for callback in trainer.callbacks
    )


def _is_lightnings(hook: Any) -> bool:
    """Whether a hook is Lightning's own: these look at the batch and the Trainer alone."""
    return str(getattr(hook, "__module__", "")).startswith("lightning.pytorch.")
