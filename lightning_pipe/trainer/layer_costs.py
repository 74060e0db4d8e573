"""The costs that a run goes by: measured in its first batch where none are known for samples like its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

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


@contextmanager
def measured(pipeline: Pipeline, store: ProfileStore | None, micro_batches: MicroBatches) -> Iterator[None]:
    """Around a training batch: measure and store what layers cost, unless that is known of samples of its shapes.

    Args:
        pipeline: the module over the ranks.
        store: where the costs are kept; ``None``: nobody wants them.
        micro_batches: the batch.
    """
    shapes = None if store is None else shapes_of(micro_batches)
    if store is None or (store.found is not None and store.shapes in (None, shapes)):
        yield
        return
    with profiled(pipeline) as profiler:
        yield
    costs = profiler.gather()
    if pipeline.transport.process == 0:
        conditions = {**store.conditions, SHAPES: str(shapes), "source": "the first batch of a run"}
        profile = replace(store.module, sizes={micro_batches.sizes[0]: costs}, conditions=conditions)
        try:
            profile.save(store.path)
        except OSError as error:
            warnings.warn(f"The costs of the layers cannot be stored: {error}.", stacklevel=2)
            return
        told: Any = pipeline.module
        told.print(f"Measured the layers: the next run is balanced by {store.path}")
