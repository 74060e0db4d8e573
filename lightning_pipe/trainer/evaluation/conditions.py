"""What keeps the batches of an evaluation from following each other through the stages without waiting."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.lightning_internals import DataLoaderIterDataFetcher
from lightning_pipe.parameters.deferred_batchnorm import deferred_norms
from lightning_pipe.torch_internals import is_compiled
from lightning_pipe.trainer.data.batch_hooks import hooks_between
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.trainer.user_step import UserStep

# Lightning shows what its own loggers are told; that of this package has no handler.
_log = logging.getLogger("lightning.pytorch.lightning_pipe")


def tell_that_batches_wait(name: str, reason: str) -> None:
    """Say that an evaluation does not stream.

    Args:
        name: the method that evaluates a batch.
        reason: in words that follow "because".
    """
    _log.info(f"{name}: each batch passes all ranks before the next one begins, because {reason}.")


def reason_to_wait(module: pl.LightningModule, pipeline: Pipeline, step: UserStep, loop: Any, name: str) -> str | None:
    """Why each batch must have passed all ranks before the next one begins; ``None`` if it need not.

    Args:
        module: the LightningModule, with its Trainer.
        pipeline: the module over the ranks.
        step: what its steps have in common.
        loop: the loop of Lightning that is about to begin.
        name: the method that evaluates a batch.
    """
    if name in step.in_turns:
        return "the step comes back to layers that it has called, and one rank computes at a time"
    if isinstance(loop._data_fetcher, DataLoaderIterDataFetcher):
        return f"{name} takes the loader's iterator"
    for hook in hooks_between(module, name):
        # it may change what the steps of later batches use, such as weights
        return f"{hook} is called between two batches"
    for metric in step.metrics.in_layers:
        return f"the metric {metric!r} is part of a module that earlier stages run"
    if any(map(is_compiled, step.attributes.tracked.modules.values())):
        return "the code around the layers is compiled, and what it reads cannot be seen"
    return _what_replicas_do(module, loop) if pipeline.transport.topology.replicas > 1 else None


def _what_replicas_do(module: pl.LightningModule, loop: Any) -> str | None:
    """What the replicas do together for every batch, which must be in the same order on all of them."""
    if any(isinstance(loader, SharedDataLoader) and loader.compares for loader in loop._combined_loader.flattened):
        return "the replicas' loaders may differ in length"
    return "batch norm is in training mode" if any(norm.training for norm in deferred_norms(module)) else None
