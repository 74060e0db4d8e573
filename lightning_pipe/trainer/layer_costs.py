"""The costs that a run goes by: measured in its first batch where none are known for samples like its own."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.engine.containers import signature
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.cost_profile import SHAPES
from lightning_pipe.planning.profile_store import ProfileStore
from lightning_pipe.profiling.first_batch import profiled
from lightning_pipe.profiling.measure import shapes_of_a_sample


def shapes_of(micro_batches: MicroBatches) -> str:
    """What a sample of the input is like, in words; of a batch without tensors what its first part is like."""
    try:
        return shapes_of_a_sample(micro_batches.parts[0])
    except ConfigurationError:
        return str(signature(micro_batches.parts[0]))


class LayerCosts:
    """Measures once in a run, and stores the result.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.
        store: where the costs are kept; ``None``: nobody wants them, and nothing is measured.
    """

    def __init__(self, module: pl.LightningModule, pipeline: Pipeline, store: ProfileStore | None) -> None:
        self._module, self._pipeline, self._store = module, pipeline, store

    @contextmanager
    def measured(self, micro_batches: MicroBatches) -> Generator[None, None, None]:
        """Around a training batch: the first one is measured, unless costs of samples of these shapes are known."""
        store, self._store = self._store, None
        shapes = None if store is None else shapes_of(micro_batches)
        if store is None or (store.found is not None and store.shapes in (None, shapes)):
            yield
            return
        with profiled(self._pipeline) as profiler:
            yield
        costs = profiler.gather()
        if self._pipeline.transport.process == 0:
            conditions = {**store.conditions, SHAPES: str(shapes), "source": "the first batch of a run"}
            profile = replace(store.module, sizes={micro_batches.sizes[0]: costs}, conditions=conditions)
            try:
                profile.save(store.path)
            except OSError as error:
                warnings.warn(f"The costs of the layers cannot be stored: {error}.", stacklevel=2)
                return
            self._module.print(f"Measured the layers: the next run is balanced by {store.path}")

    def warn_if_wanted(self) -> None:
        """Warn that a schedule without a flush measures nothing, if costs are wanted and none are known."""
        if self._store is not None and self._store.found is None:
            rank_zero_warn(
                "Layers are measured in the first batch of a schedule with a flush; this run leaves no measurements."
            )
