"""Precision over stages: gradients are clipped, and overflows decided, for the whole model at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_pipe.pipeline.runner import Pipeline


def loss_scale(plugin: Precision) -> float:
    """The factor that the plugin's gradient scaler will put on the loss; 1 without one."""
    scaler = getattr(plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


@contextmanager
def over_stages(plugin: Precision, pipeline: Pipeline) -> Iterator[None]:
    """Let a precision plugin see the whole model instead of this rank's stages.

    * ``gradient_clip_val`` limits the norm of all gradients of the model, each parameter counted once.
    * The gradient scaler finds an overflow on any stage on all of them, so that all skip the same steps.

    Args:
        plugin: the Trainer's precision plugin.
        pipeline: knows who counts which parameter.
    """
    scaler: Any = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    vars(plugin)["clip_grad_by_norm"] = MethodType(_clip_by_norm(pipeline), plugin)
    if scaler is not None:
        scaler._unscale_grads_ = _unscale(scaler._unscale_grads_, pipeline)
    try:
        yield
    finally:
        vars(plugin).pop("clip_grad_by_norm", None)
        if scaler is not None:
            vars(scaler).pop("_unscale_grads_", None)


def clip_grad_norm(pipeline: Pipeline, parameters: list[Tensor], limit: float) -> Tensor:
    """Scale the gradients of this rank's parameters so that the norm over all ranks is at most ``limit``.

    Collective over the pipeline.

    Args:
        pipeline: knows who counts which parameter.
        parameters: of this rank or placeholders, each once.
        limit: the largest norm of all gradients of the model together.

    Returns:
        The norm before.
    """
    names = {id(parameter): name for name, parameter in pipeline.module.named_parameters()}
    counted = [
        p.grad
        for p in parameters
        if p.grad is not None and (id(p) not in names or pipeline.ownership.counted(names[id(p)]))
    ]
    device = pipeline.transport.device
    norm = get_total_norm(counted) if counted else torch.zeros(())
    square = norm.to(device, torch.float64).square()
    pipeline.transport.all_reduce(square, pipeline.pipeline_members).wait()
    trained = [p for p in parameters if p.grad is not None]
    # in the precision of the gradients, as on one device
    total = square.sqrt().to(trained[0].grad.dtype if trained and trained[0].grad is not None else torch.float32)
    clip_grads_with_norm_(trained, limit, total)
    return total


def _clip_by_norm(pipeline: Pipeline) -> Callable[[Precision, Optimizer, float], None]:
    def clip_grad_by_norm(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm(pipeline, list(plugin.main_params(optimizer)), clip_val)

    return clip_grad_by_norm


def _unscale(unscale: Callable[..., dict[Any, Tensor]], pipeline: Pipeline) -> Callable[..., dict[Any, Tensor]]:
    """The scaler's search for overflows, with the findings of all stages in the result."""

    def unscale_gradients(*args: Any, **kwargs: Any) -> dict[Any, Tensor]:
        found = unscale(*args, **kwargs)
        device = pipeline.transport.device
        # a rank without gradients has looked at none, and must decide nevertheless
        overflows = found or {device: torch.zeros((), device=device)}
        largest = torch.stack([overflow.reshape(()).to(device) for overflow in overflows.values()]).max()
        pipeline.transport.all_reduce(largest, pipeline.pipeline_members, "max").wait()
        for overflow in overflows.values():
            overflow.copy_(largest)
        return overflows

    return unscale_gradients
