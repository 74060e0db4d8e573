"""Measures the layers in the first training batch, for the next run to be balanced by."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pipe.engine.containers import signature
from lightning_pipe.engine.layer_profiler import profiled
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import ProfileStore
from lightning_pipe.trainer.data.micro_batches import MicroBatches


class LayerCosts:
    """Measures once in a run, and stores the result by the shape of a micro-batch.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.
        store: where the costs are kept; ``None``: nobody wants them, and nothing is measured.
    """

    def __init__(self, module: pl.LightningModule, pipeline: Pipeline, store: ProfileStore | None) -> None:
        self._module, self._pipeline, self._store = module, pipeline, store

    @contextmanager
    def measured(self, micro_batches: MicroBatches) -> Generator[None, None, None]:
        """Around a training batch: the first one is measured, unless its shape has been measured in an earlier run."""
        store, self._store = self._store, None
        if store is None:
            yield
            return
        shape = str(signature(micro_batches.parts[0]))
        writes = self._pipeline.transport.process == 0
        if shape in store.signatures:
            yield
            # the costs of the last shape are those that the next run is balanced by
            if writes and shape != store.signatures[-1]:
                store.save(shape)
            return
        with profiled(self._pipeline) as profiler:
            yield
        profile = profiler.gather()
        if writes:
            store.save(shape, profile)
            self._module.print(f"Measured the layers: the next run is balanced by {store.path}")

    def warn_if_wanted(self) -> None:
        """Warn that a schedule without a flush measures nothing, if costs are wanted and none are known."""
        if self._store is not None and not self._store.signatures:
            rank_zero_warn(
                "Layers are measured in the first batch of a schedule with a flush; this run leaves no measurements."
            )
