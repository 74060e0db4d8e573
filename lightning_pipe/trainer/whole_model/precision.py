"""What the Trainer's precision plugin decides by all gradients, for the whole model at once: clipping and overflows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.whole_gradients import gradient_norm, unscaling_together
from lightning_pipe.patches import all_replaced


def loss_scale(plugin: Precision) -> float:
    """The factor that the plugin's gradient scaler will put on the loss; 1 without one."""
    scaler = getattr(plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def deciding_together(plugin: Precision, pipeline: Pipeline) -> AbstractContextManager[None]:
    """Let the plugin limit the norm of the whole model's gradients inside, and skip steps with overflows on all ranks.

    Replicas may differ even where each has all sums: code of the user has changed gradients on one of them. With a
    divided optimizer the others would wait for the share that it does not update.

    Args:
        plugin: the Trainer's precision plugin.
        pipeline: the module over the ranks.
    """

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(plugin.main_params(optimizer))
        clip_grads_with_norm_(parameters, clip_val, gradient_norm(pipeline, parameters), foreach=foreach)

    def clip_values(optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_value_(list(plugin.main_params(optimizer)), clip_val, foreach=foreach)

    scaler: Any = getattr(plugin, "scaler", None)
    reductions = pipeline.reductions
    # torch (2.13) refuses plain tensors and DTensors in one operation
    foreach = None if reductions.sharded is None else False
    places: list[tuple[Any, str, Any]] = []
    if scaler is not None:
        places.append((scaler, "_unscale_grads_", unscaling_together(scaler._unscale_grads_, pipeline)))
    if len(pipeline.pipeline_members) > 1 or reductions.scattered or reductions.sharded:
        places.append((plugin, "clip_grad_by_norm", clip))
    if reductions.sharded:
        places.append((plugin, "clip_grad_by_value", clip_values))
    return all_replaced(places)
