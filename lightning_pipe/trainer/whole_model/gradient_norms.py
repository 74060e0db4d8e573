"""The norm of the gradients of a whole model, whose ranks have those of their own stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.patches import replaced


@contextmanager
def clipping_together(plugin: Precision, pipeline: Pipeline) -> Iterator[None]:
    """Let the Trainer limit the norm of the whole model's gradients inside, not that of each rank's.

    Args:
        plugin: the Trainer's precision plugin, which clips.
        pipeline: the module over the ranks.
    """
    if len(pipeline.pipeline_members) == 1 and not pipeline.reductions.scattered:
        yield
        return

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(plugin.main_params(optimizer))
        clip_grads_with_norm_(parameters, clip_val, gradient_norm(pipeline, parameters))

    with replaced(plugin, "clip_grad_by_norm", clip):
        yield


@torch.no_grad()
def gradient_norm(pipeline: Pipeline, parameters: Iterable[nn.Parameter], order: float = 2.0) -> Tensor:
    """The norm of the gradients of parameters over all ranks, each of them once. Collective over the pipeline.

    Args:
        pipeline: knows who counts which parameter.
        parameters: the same on all ranks.
        order: 2 for the square root of the sum of squares, infinity for the largest.

    Raises:
        ConfigurationError: no rank, or none any more, has the gradients of one batch.
    """
    if pipeline.asynchronous is not None:
        raise ConfigurationError(
            f"Without a flush ({pipeline.family.name!r}) the ranks have gradients of different batches: there is no "
            "norm of all.",
            hint="Use torch.nn.utils.get_total_norm, which gives the norm of this rank's stages, or a schedule with a "
            "flush.",
        )
    if pipeline.gradients_divided:
        raise ConfigurationError(
            "With shard_optimizer=True no rank has all gradients of its parameters any more once they are clipped.",
            hint="Ask for norms in on_before_optimizer_step or configure_gradient_clipping.",
        )
    given = [*parameters]
    names = {id(parameter): name for name, parameter in pipeline.module.named_parameters()}
    counted = [
        parameter.grad
        for parameter in given
        if parameter.grad is not None
        and not isinstance(parameter.grad, AbsentTensor)
        and (name := names.get(id(parameter))) is not None
        and pipeline.holds(name)
        and pipeline.reductions.counts(parameter, first=pipeline.ownership.counted(name))
    ]
    local = get_total_norm(counted, order).double() if counted else torch.zeros((), dtype=torch.float64)
    mine = float(local if math.isinf(order) else local**order)
    found = pipeline.transport.all_gather_object(mine, pipeline.reductions.members_with_all)
    powers = torch.tensor(found, dtype=torch.float64)
    total = powers.max() if math.isinf(order) else powers.sum() ** (1 / order)
    # in the precision of the gradients, as on one device; filled there, which holds nobody
    dtype = next((each.grad.dtype for each in given if each.grad is not None), torch.get_default_dtype())
    return torch.full((), float(total.to(dtype)), dtype=dtype, device=pipeline.transport.device)
