"""A module that stays whole on every rank until its first batch has shown its layers.

What happens, and where::

    before the first batch     every rank holds the whole module; no layers, no stages
    the first batch arrives    one rank runs the step once, alone, and sees what it calls           `look`
                               all ranks divide the module by that, and free what is not theirs     `divide`
                               the batch runs through the pipeline, as every later one does

Nothing has to move: every rank has had every value, and optimizers refer to the same parameters before and after.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipe.engine.batch import Batch, StepFunction
from lightning_pipe.engine.first_batch.trial_runs import leaving_no_trace
from lightning_pipe.partition import Layers
from lightning_pipe.partition.calls import Call, recorded

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline


def look(pipeline: Pipeline, step: StepFunction, micro_batch: Any, *, training: bool, seed: int) -> list[Call]:
    """Run a step once, on this rank alone, and see what it calls. Nothing else comes of it.

    Args:
        pipeline: the module.
        step: see `Pipeline.train`.
        micro_batch: its batch, or a slice of it.
        training: whether it is a training step.
        seed: the seed of its random streams.
    """
    stages = pipeline.executor.stages
    batch = pipeline.batch(step, [micro_batch], seed)
    with (
        recorded(pipeline.module) as calls,
        pipeline.running(batch.streams),
        leaving_no_trace(stages, trained=True),
        torch.set_grad_enabled(training),  # a step may ask for derivatives
    ):
        stages.trial(len(pipeline.balance) - 1, 0, batch, None)
    gc.collect()  # a graph that is left would refer to parameters, and such parameters cannot be freed in place
    return calls


def divide(pipeline: Pipeline, layers: Layers, balance: Sequence[int], passes: int) -> None:
    """Divide the module, which has been whole so far, over the ranks. Collective.

    Args:
        pipeline: the module; whoever refers to this object goes on with the divided module.
        layers: the layer sequence.
        balance: the number of layers of each stage.
        passes: how often a training step runs the layers.
    """
    divided = replace(pipeline, layers=layers, balance=[*balance], passes=passes)
    divided.reductions.dtype = pipeline.reductions.dtype
    divided.reductions.scattered = pipeline.reductions.scattered
    pipeline.__dict__ = divided.__dict__  # whoever refers to either goes on with the same
    pipeline.partition()


def run_whole(pipeline: Pipeline, batch: Batch) -> dict[int, Any]:
    """Run an evaluation before the module is divided: every rank runs all of it, and keeps what layers keep.

    What the step returns, logs and sets counts on the rank with the loss of the first pipe.
    """
    stages, last = pipeline.executor.stages, len(pipeline.balance) - 1
    stages.layers = [each._replace(heard=pipeline.transport.rank == pipeline.loss_ranks[0]) for each in stages.layers]
    with pipeline.running(batch.streams):
        for index in range(len(batch.micro_batches)):
            stages.forward(last, index, batch, lambda: None)
    return batch.results if stages.layers[last].heard else {}
