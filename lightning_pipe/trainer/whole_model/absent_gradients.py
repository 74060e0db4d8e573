"""Gives parameters of other ranks gradients without values in hooks, as the parameters have gradients on one device.

Code that goes over all gradients (noise that is added to them, limits, sums of norms, ``if p.grad is not None``) then
takes the same path on all ranks: it draws the same random numbers, and cannot take a part of the sum for the whole.
Optimizers do not see these gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.mixing import after_closure


class AbsentGradients:
    """Gradients of parameters that other ranks of a pipeline hold.

    The ranks ask each other which parameters get one, and again when other parameters are to be trained.

    Args:
        pipeline: the module over the ranks.
        optimizers: the optimizers, which are to see none of these gradients.
    """

    def __init__(self, pipeline: Pipeline, optimizers: Sequence[Optimizer]) -> None:
        self._pipeline = pipeline
        self._parameters = list(pipeline.module.parameters())
        self._trainable: list[bool] = []
        self._gradients: list[tuple[nn.Parameter, AbsentTensor]] = []
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._set()))

    def remove(self) -> None:
        """End."""
        self._hide()
        for hook in self._hooks:
            hook.remove()

    def show(self) -> None:
        """After a backward pass: set the gradients. Collective over the pipeline when other parameters are trained."""
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            self._learn()
        self._set()

    def _learn(self) -> None:
        pipeline, named = self._pipeline, dict(self._pipeline.module.named_parameters())
        mine = [name for name, p in named.items() if pipeline.holds(name) and p.grad is not None]
        found = pipeline.transport.all_gather_object(mine, pipeline.pipeline_members)
        absent = {name: named[name] for names in found for name in names if not pipeline.holds(name)}
        self._gradients = [(p, AbsentTensor.like(p.detach())) for p in absent.values() if isinstance(p, AbsentTensor)]

    def _set(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _hide(self) -> None:
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return after_closure(args, kwargs, self._hide)
