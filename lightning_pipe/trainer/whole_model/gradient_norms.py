"""Lets the Trainer clip by the norm of the gradients of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.plugins.precision import Precision
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.whole_gradients import gradient_norm
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
