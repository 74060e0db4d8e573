"""Gradients of a run between ``training_step`` and the optimizer's step, and what optimizers take of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from traceback import walk_tb
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.mixing import Mixing
from lightning_pipe.patches import around_steps, replaced
from lightning_pipe.sharding.undone import refer_to_module
from lightning_pipe.torch_internals import DisableTorchFunctionSubclass
from lightning_pipe.trainer.whole_model.absent_gradients import AbsentGradients

_NO_GRADIENTS = (
    "In an optimizer's step the parameters of other ranks have no gradient, like frozen ones: weight.grad is None. "
    "Optimizers of torch leave such parameters out: `if weight.grad is None: continue`."
)


def not_in_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that ``BaseFinetuning`` adds to an optimizer.

    Lightning (2.6) also leaves out those that are equal to one in it (``torch.equal``), and each rank has the values of
    its own stages alone.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if id(parameter) not in known]


class Gradients:
    """Sums gradients when their batch is complete, shows them to hooks, and sorts out who updates what.

    Args:
        pipeline: the LightningModule over the ranks.
        divides: whether holders divide the update and the optimizer state of a parameter, or each updates all it holds.

    Attributes:
        blocked: whether Lightning accumulates gradients: the current batch is not the last one before a step.
    """

    def __init__(self, pipeline: Pipeline, *, divides: bool) -> None:
        self.blocked = False
        self._pipeline, self._divides = pipeline, divides
        self._module: Any = pipeline.module
        self._accumulated = False
        self._holders_known = False
        self._seen_old = False  # whether a hook may look at gradients that are about to be zeroed
        self._absent: AbsentGradients | None = None
        self._changed = ExitStack()

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Show hooks the gradients of all ranks, and refuse optimizers that join those of several parameters."""
        several = len(self._pipeline.pipeline_members) > 1
        callbacks: Any = self._module.trainer.callbacks
        zeroing = "on_before_zero_grad", "optimizer_zero_grad"
        self._seen_old = any(is_overridden(hook, self._module) for hook in zeroing) or any(
            is_overridden("on_before_zero_grad", callback, pl.Callback) for callback in callbacks
        )
        others = staticmethod(not_in_optimizer)
        self._changed.enter_context(replaced(BaseFinetuning, "filter_on_optimizer", others, gated=False))
        # an asynchronous schedule has gradients of different batches on different ranks
        scattered = self._pipeline.reductions.scattered
        if (several or scattered) and self._pipeline.asynchronous is None:
            self._absent = AbsentGradients(self._pipeline)
            self._changed.callback(self._absent.remove)
        if several or self._divides:
            names = {id(parameter): name for name, parameter in self._module.named_parameters()}
            for optimizer in optimizers:
                self._changed.callback(Mixing(optimizer, names).remove)

    def end(self) -> None:
        """Leave hooks and optimizers as they were found."""
        self._changed.close()
        self._absent = None

    def explain(self, error: Exception, optimizer: Optimizer) -> None:
        """Say what pipelines have to do with an error in a step of the optimizer.

        Raises:
            CutError: a parameter of this rank has been given data that comes from other ranks.
        """
        if any(frame.f_code.co_name == "closure" for frame, _ in walk_tb(error.__traceback__)):
            return  # from the training step
        self._pipeline.ownership.check_data()
        if any(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            error.add_note(_NO_GRADIENTS)

    @property
    def reduced_at_once(self) -> bool:
        """Whether the gradients of the coming batch are summed over the holders of parameters while it runs.

        Those of several batches are summed together after the last of them, unless no holder is to keep them whole so
        long: then each batch's are summed for their owners, who add them up.
        """
        return self._pipeline.reductions.scattered or not (self.blocked or self._accumulated)

    def free_old(self, optimizers: Sequence[Optimizer]) -> None:
        """Free the gradients that Lightning is about to zero, unless a hook may look at them first."""
        trainer: Any = self._module.trainer
        first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        # a callback that renews batch norm's statistics (SWA) has neither gradients zeroed nor a backward pass run
        if first and not self._seen_old and not trainer.fit_loop._skip_backward:
            with DisableTorchFunctionSubclass():  # several times as fast as the optimizer's own zero_grad
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    for parameter in group["params"]:
                        parameter.grad = None

    def after_batch(self, optimizers: Sequence[Optimizer]) -> None:
        """After the passes of a batch, before its gradients are returned to autograd."""
        self._accumulated |= self.blocked and not self._pipeline.reductions.scattered
        # the first batch shows who uses which parameter outside the layers: once in a run
        if not self._holders_known and self._pipeline.ownership.users_known:
            # a part that is released has become another object
            refer_to_module(optimizers, self._pipeline.module, self._pipeline.ownership)
            self.complete_states(optimizers)  # none is divided yet
            self._holders_known = True
            if self._divides:
                self._divide(optimizers)
        if self._pipeline.reductions.scattered:
            self._check_hooks()

    def after_backward(self) -> None:
        """Sum accumulated gradients once they are complete: hooks are to see the gradients of all ranks."""
        if self._accumulated and not self.blocked:
            self._pipeline.reductions.finish()
            self._accumulated = False
        if self._absent is not None:
            self._absent.show()

    def complete_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers have the whole state of what this process holds, and no other. Collective where divided."""
        for optimizer in optimizers:
            # some optimizers keep something of parameters without gradients, too
            for parameter in [each for each in optimizer.state if isinstance(each, AbsentTensor)]:
                del optimizer.state[parameter]
        if self._divides and self._holders_known:
            self._pipeline.reductions.shards.gather_states(optimizers)

    # ------------------------------------------------------------------ shard_optimizer

    def _divide(self, optimizers: Sequence[Optimizer]) -> None:
        """Let holders divide optimizers, once the ranks have agreed who holds which parameter."""
        trainer: Any = self._module.trainer
        shards, precision = self._pipeline.reductions.shards, trainer.precision_plugin
        shards.drop_states(optimizers)
        after_closure = precision._after_closure

        def drop(model: pl.LightningModule, optimizer: Any) -> None:
            after_closure(model, optimizer)  # gradients are dropped after it has clipped them
            shards.drop_gradients()
            self._pipeline.gradients_divided = True

        if not self._pipeline.reductions.scattered:  # else no other process has a gradient of what this one updates
            self._changed.enter_context(replaced(precision, "_after_closure", drop))
        self._changed.enter_context(around_steps(trainer, lambda *_: None, lambda *_: shards.share()))

    def _check_hooks(self) -> None:
        """Before the gradients of a batch are handed over.

        Raises:
            ConfigurationError: a hook waits for the gradient of a parameter whose sum one holder alone gets: what it
                does there, such as an update, the others would lack.
        """
        for group in self._pipeline.reductions.shards.groups:
            for parameter in group.parameters:
                if getattr(parameter, "_post_accumulate_grad_hooks", None):
                    raise ConfigurationError(
                        f"A hook waits for the gradient of {self._pipeline.ownership.name_of(parameter)!r} "
                        '(register_post_accumulate_grad_hook); with shard_optimizer="gradients" it would be called on '
                        "one of the ranks that hold the parameter.",
                        hint="Use shard_optimizer=True: all of them have the gradient then.",
                    )

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state of the parameters that this process holds. Collective where it is divided."""
        self.complete_states([optimizer])
        state = optimizer.state_dict()
        if self._divides:
            self._pipeline.reductions.shards.drop_states([optimizer])
        return state
