"""What keeps the batches of an evaluation from following each other through the stages without waiting."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.module_state import is_torchs
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.trainer.evaluation.steps import EvaluationSteps

# Lightning shows what its own loggers are told; that of this package has no handler.
_log = logging.getLogger("lightning.pytorch.lightning_pipe")
GIVEN = "a step comes back to layers that it has called, or gives them what an earlier batch has changed"
"""What the ranks see while batches stream."""
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def tell_that_batches_wait(name: str, reason: str) -> None:
    """Say that an evaluation does not stream.

    Args:
        name: the method that evaluates a batch.
        reason: in words that follow "because".
    """
    _log.info(f"{name}: each batch passes all ranks before the next one begins, because {reason}.")


def reasons_to_wait(module: pl.LightningModule, steps: EvaluationSteps, loop: Any, name: str) -> Iterator[str]:
    """Why each batch must have passed all ranks before the next one begins.

    Args:
        module: the LightningModule, with its Trainer.
        steps: runs its steps.
        loop: the loop of Lightning that is about to begin.
        name: the method that evaluates a batch.
    """
    pipeline = steps.pipeline
    if name in steps.waiting or name in steps.user_step.in_turns:
        yield GIVEN
    for hook in _hooks_between(module, name):
        # it may change what the steps of later batches use, such as weights
        yield f"{hook} is called between two batches"
    replicas, loaders = pipeline.transport.topology.replicas > 1, loop._combined_loader.flattened
    if replicas and any(isinstance(loader, SharedDataLoader) and loader.compares for loader in loaders):
        yield "the replicas' loaders may differ in length"
    if (replicas or not pipeline.linear) and any(norm.training for norm in pipeline.norms):
        # replicas update statistics together; two stages of a rank may update those of one norm
        yield "batch norm is in training mode"
    if (part := _shared_by_stages(pipeline)) is not None:
        yield f"several stages of a rank share {part}, which may change in each batch"


def _hooks_between(module: pl.LightningModule, name: str) -> Iterator[str]:
    """The hooks that are called for every batch and are not Lightning's own."""
    trainer: Any = module.trainer
    stage = name.removesuffix("_step")
    for hook in (f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
        for owner in (module, *trainer.callbacks):
            # Lightning's own look at the batch and the Trainer alone
            if not str(getattr(getattr(owner, hook), "__module__", "")).startswith("lightning.pytorch."):
                yield f"{type(owner).__name__}.{hook}"
    for hook in _TRANSFERS:
        for owner in (module, trainer.datamodule):
            if owner is not None and is_overridden(hook, owner):
                yield f"{type(owner).__name__}.{hook}"


def _shared_by_stages(pipeline: Pipeline) -> str | None:
    """A module that a late stage of a rank may run for a batch when an early one has run it for later batches."""
    users: dict[tuple[int, int], int] = {}
    for stage, span in enumerate(pipeline.stage_layers):
        for name, layer in (pipeline.layers[number] for number in span):
            for inner, part in layer.named_modules():
                key = (pipeline.placement[0, stage], id(part))
                # those of torch do not change in evaluation mode
                if not is_torchs(type(part)) and users.setdefault(key, stage) != stage:
                    return f"'{name}.{inner}'".replace(".'", "'")
    return None
