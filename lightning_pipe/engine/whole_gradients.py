"""What takes the gradients of the whole model, whose ranks have those of their own stages: norms and overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.local_parts import is_divided, local


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
        local(parameter.grad)
        for parameter in given
        if parameter.grad is not None
        and not isinstance(parameter.grad, AbsentTensor)
        and (name := names.get(id(parameter))) is not None
        and pipeline.holds(name)
        and pipeline.reductions.counts(parameter, first=pipeline.ownership.counted(name))
    ]
    norm = get_total_norm(counted, order).double() if counted else torch.zeros((), dtype=torch.float64)
    mine = float(norm if math.isinf(order) else norm**order)
    found = pipeline.transport.all_gather_object(mine, pipeline.reductions.members_with_all)
    powers = torch.tensor(found, dtype=torch.float64)
    total = powers.max() if math.isinf(order) else powers.sum() ** (1 / order)
    # in the precision of the gradients, as on one device; filled there, which holds nobody
    dtype = next((each.grad.dtype for each in given if each.grad is not None), torch.get_default_dtype())
    return torch.full((), float(total.to(dtype)), dtype=dtype, device=pipeline.transport.device)


def _of_parts(optimizer: Any) -> Any:
    """An optimizer as a gradient scaler looks at it, with this process's parts of what several divide.

    A scaler (torch 2.13) takes all gradients into one operation, which refuses plain tensors and DTensors together.
    """
    parts: list[Tensor] = []
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parts.append(local(parameter).detach() if is_divided(parameter) else parameter)
        if is_divided(parameter) and parameter.grad is not None:
            parts[-1].grad = local(parameter.grad)
    return SimpleNamespace(param_groups=[{"params": parts}])


def unscaling_together(
    unscale: Callable[..., dict[Any, Tensor]], pipeline: Pipeline
) -> Callable[..., dict[Any, Tensor]]:
    """A gradient scaler's search for overflows, which then returns those of all processes."""
    everyone = pipeline.transport.topology.everyone

    def unscale_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> dict[Any, Tensor]:
        found = unscale(_of_parts(optimizer), *args, **kwargs)
        device = pipeline.transport.device
        # a rank without gradients has looked at none, and must decide nevertheless
        overflows = found or {device: torch.zeros((), device=device)}
        largest = torch.stack([overflow.reshape(()).to(device) for overflow in overflows.values()]).max()
        pipeline.transport.all_reduce(largest, everyone, "max").wait()
        for overflow in overflows.values():
            overflow.copy_(largest)
        return overflows

    return unscale_gradients
