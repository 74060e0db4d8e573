"""What keeps the batches of an evaluation from following each other through the stages without waiting."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.module_state import is_torchs
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.trainer.evaluation.steps import EvaluationSteps

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batches_wait(module: pl.LightningModule, steps: EvaluationSteps, loop: Any, name: str) -> bool:
    """Whether each batch must have passed all ranks before the next one begins.

    Args:
        module: the LightningModule, with its Trainer.
        steps: runs its steps.
        loop: the loop of Lightning that is about to begin.
        name: the method that evaluates a batch.
    """
    pipeline = steps.pipeline
    replicas, loaders = pipeline.transport.topology.replicas > 1, loop._combined_loader.flattened
    return (
        name in steps.waiting
        or name in steps.user_step.in_turns
        # it may change what the steps of later batches use, such as weights
        or _has_hooks_between(module, name)
        # the replicas' loaders may differ in length
        or (replicas and any(isinstance(loader, SharedDataLoader) and loader.compares for loader in loaders))
        # replicas update statistics together; two stages of a rank may update those of one norm
        or ((replicas or not pipeline.linear) and any(norm.training for norm in pipeline.norms))
        or _share_modules(pipeline)
    )


def _has_hooks_between(module: pl.LightningModule, name: str) -> bool:
    """Whether a hook is called for every batch that is not Lightning's own."""
    trainer: Any = module.trainer
    stage = name.removesuffix("_step")
    hooks = (f"on_{stage}_batch_start", f"on_{stage}_batch_end")
    found = (getattr(owner, hook) for hook in hooks for owner in (module, *trainer.callbacks))
    # Lightning's own look at the batch and the Trainer alone
    if any(not str(getattr(hook, "__module__", "")).startswith("lightning.pytorch.") for hook in found):
        return True
    owners = [owner for owner in (module, trainer.datamodule) if owner is not None]
    return any(is_overridden(hook, owner) for hook in _TRANSFERS for owner in owners)


def _share_modules(pipeline: Pipeline) -> bool:
    """Whether a late stage of a rank may run a module for a batch when an early one has run it for later batches."""
    users: dict[tuple[int, int], int] = {}
    for stage, span in enumerate(pipeline.stage_layers):
        for part in (part for number in span for part in pipeline.layers[number][1].modules()):
            key = (pipeline.placement[0, stage], id(part))
            # those of torch do not change in evaluation mode
            if not is_torchs(type(part)) and users.setdefault(key, stage) != stage:
                return True
    return False
