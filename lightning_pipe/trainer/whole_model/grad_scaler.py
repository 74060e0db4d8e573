"""Lets a gradient scaler decide for the whole model at once whether a step has overflowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.patches import replaced


def loss_scale(plugin: Precision) -> float:
    """The factor that the plugin's gradient scaler will put on the loss; 1 without one."""
    scaler = getattr(plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


@contextmanager
def over_stages(plugin: Precision, pipeline: Pipeline) -> Iterator[None]:
    """Let all stages of all replicas know of an overflow on any of them, so that all of them skip the same steps.

    Replicas may differ even where each has all sums: code of the user has changed gradients on one of them. With a
    divided optimizer the others would wait for the share that it does not update.

    Args:
        plugin: the Trainer's precision plugin.
        pipeline: the module over the ranks.
    """
    scaler: Any = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None:
        yield
        return
    with replaced(scaler, "_unscale_grads_", _unscale(scaler._unscale_grads_, pipeline)):
        yield


def _unscale(unscale: Callable[..., dict[Any, Tensor]], pipeline: Pipeline) -> Callable[..., dict[Any, Tensor]]:
    """The scaler's search for overflows, which then returns those of all processes."""
    everyone = tuple(range(pipeline.transport.topology.world_size))

    def unscale_gradients(*args: Any, **kwargs: Any) -> dict[Any, Tensor]:
        found = unscale(*args, **kwargs)
        device = pipeline.transport.device
        # a rank without gradients has looked at none, and must decide nevertheless
        overflows = found or {device: torch.zeros((), device=device)}
        largest = torch.stack([overflow.reshape(()).to(device) for overflow in overflows.values()]).max()
        pipeline.transport.all_reduce(largest, everyone, "max").wait()
        for overflow in overflows.values():
            overflow.copy_(largest)
        return overflows

    return unscale_gradients
