"""``shard_optimizer``: the holders of a parameter divide its update and its optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.zero import OptimizerShards
from lightning_pipe.patches import replaced


class ShardedOptimizers:
    """Divides the optimizers of a run over the holders of each parameter, from its first training batch on.

    Args:
        pipeline: the module over the ranks.
        precision: the Trainer's precision plugin: gradients are dropped after it has clipped them.
    """

    def __init__(self, pipeline: Pipeline, precision: Precision) -> None:
        self._pipeline, self._precision = pipeline, precision
        self._shards: OptimizerShards | None = None
        self._changed = ExitStack()

    def install(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin, once the ranks have agreed who holds which parameter."""
        reductions = self._pipeline.reductions
        shards = self._shards = reductions.shards
        assert shards is not None
        shards.drop_states(optimizers)
        after_closure = self._precision._after_closure

        def drop(model: pl.LightningModule, optimizer: Any) -> None:
            after_closure(model, optimizer)
            shards.drop_gradients()
            self._pipeline.gradients_divided = True

        if not reductions.scattered:  # else no other process has a gradient of what this one updates
            self._changed.enter_context(replaced(self._precision, "_after_closure", drop))
        for optimizer in optimizers:
            self._changed.callback(optimizer.register_step_post_hook(lambda *_: shards.share()).remove)

    def remove(self) -> None:
        """End."""
        self._changed.close()

    def check_hooks(self) -> None:
        """Before the gradients of a batch are handed over.

        Raises:
            ConfigurationError: a hook waits for the gradient of a parameter whose sum one holder alone gets: what it
                does there, such as an update, the others would lack.
        """
        if not self._pipeline.reductions.scattered or self._shards is None:
            return
        for parameter in (parameter for group in self._shards.groups for parameter in group.parameters):
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ConfigurationError(
                    f"A hook waits for the gradient of {self._pipeline.ownership.name_of(parameter)!r} "
                    '(register_post_accumulate_grad_hook); with shard_optimizer="gradients" it would be called on one '
                    "of the ranks that hold the parameter.",
                    hint="Use shard_optimizer=True: all of them have the gradient then.",
                )

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state of the parameters that this process holds. Collective."""
        if self._shards is None:
            return optimizer.state_dict()
        self._shards.gather_states([optimizer])
        state = optimizer.state_dict()
        self._shards.drop_states([optimizer])
        return state
