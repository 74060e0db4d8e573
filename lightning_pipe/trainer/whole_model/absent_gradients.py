"""Gives parameters without a gradient here gradients without values in hooks: they have gradients on one device.

Other ranks hold these parameters, or get the sums of their gradients.

Code that goes over all gradients (noise that is added to them, limits, sums of norms, ``if p.grad is not None``) then
takes the same path on all ranks: it draws the same random numbers, and cannot take a part of the sum for the whole.
Optimizers do not see these gradients.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.absent_tensor import AbsentTensor, Origin
from lightning_pipe.patches import after_closure, around_steps
from lightning_pipe.torch_internals import DisableTorchFunctionSubclass

_SUMMED_ELSEWHERE = (
    'shard_optimizer="gradients" sums each gradient for the process that updates the parameter: change it in place on '
    "all ranks, or read it under `if trainer.strategy.pipeline.reductions.shards.mine(parameter)`. With "
    "shard_optimizer=True all holders have it until it is clipped. The norm of all gradients comes from "
    "trainer.strategy.grad_norm(), and a limit on it is Trainer(gradient_clip_val=…)."
)


class AbsentGradients:
    """Gradients of parameters that other ranks hold, or update where sums are scattered.

    The ranks ask each other which parameters get one, and again when other parameters are to be trained.

    Args:
        pipeline: the module over the ranks. The optimizers of its Trainer are to see none of these gradients.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._parameters: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._gradients: list[tuple[nn.Parameter, AbsentTensor]] = []
        self._hooks = around_steps(pipeline.module.trainer, self._before_step, lambda *_: self._set())

    def remove(self) -> None:
        """End."""
        self._set(shown=False)
        self._hooks.close()

    def show(self) -> None:
        """After a backward pass: set the gradients. Collective over the pipeline when other parameters are trained."""
        # the first batch, behind which this is called first, may have others put in the place of some
        self._parameters = self._parameters or list(self._pipeline.module.parameters())
        with DisableTorchFunctionSubclass():
            trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            self._trainable, self._gradients = trainable, []
            pipeline, named = self._pipeline, dict(self._pipeline.module.named_parameters())
            here = [name for name, p in named.items() if pipeline.holds(name) and p.grad is not None]
            found = pipeline.transport.all_gather_object(here, pipeline.reductions.members_with_all)
            for name in dict.fromkeys(name for names in found for name in names):
                parameter = named[name]
                if (origin := self._elsewhere(name, parameter)) is not None:
                    self._gradients.append((parameter, AbsentTensor.like(parameter.detach(), origin)))
        self._set()

    def _elsewhere(self, name: str, parameter: nn.Parameter) -> Origin | None:
        """Where the gradient of a parameter is, or the sum of it; ``None``: here."""
        pipeline, reductions = self._pipeline, self._pipeline.reductions
        if not pipeline.holds(name):
            return parameter.origin if isinstance(parameter, AbsentTensor) else None
        if not reductions.scattered or reductions.shards.mine(parameter):
            return None
        owner, ownership = pipeline.transport.describe(reductions.shards.owner(parameter)), pipeline.ownership
        home: Any = SimpleNamespace(
            remedy=_SUMMED_ELSEWHERE,
            place=lambda names: f"only {owner} gets the summed gradient of {', '.join(map(repr, names))}",
            sharing=ownership.sharing,
            needed=ownership.needed,
        )
        return Origin((name,), home)

    def _set(self, *, shown: bool = True) -> None:
        with DisableTorchFunctionSubclass():  # twice as fast, for every parameter in every batch
            for parameter, gradient in self._gradients:
                parameter.grad = gradient if shown else None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return after_closure(args, kwargs, partial(self._set, shown=False))
