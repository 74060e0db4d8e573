"""Lets a gradient scaler decide for the whole model at once whether a step has overflowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.whole_gradients import unscaling_together
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
    with replaced(scaler, "_unscale_grads_", unscaling_together(scaler._unscale_grads_, pipeline)):
        yield
