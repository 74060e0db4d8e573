"""Several versions of a rank's weights at once, for batches whose forward and backward passes lie between steps.

The optimizer changes parameters in place while batches are in flight. So every batch computes with stand-ins: leaves
of their own that share the memory of the version that the batch is to use. Before a step that would change a version
which is still needed, the parameters move to fresh memory. The gradients of the stand-ins become those of the
parameters when the batch's step is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.ownership import Ownership


class _Reference(NamedTuple):
    """Where a module refers to a parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


class WeightVersions:
    """The versions of the weights that a rank holds, counted in steps since the pipeline was last empty.

    Buffers have one version: running statistics are not stashed. Source: PipeDream, section 3.3.

    Args:
        module: the user's module.
        ownership: knows which parameters this rank holds, and is told about stand-ins.

    Attributes:
        newest: steps that the parameters have seen.
        peak_held: the most versions held at once.
    """

    def __init__(self, module: nn.Module, ownership: Ownership) -> None:
        self._module, self._ownership = module, ownership
        self.newest = 0
        self.peak_held = 1
        self._stash: dict[int, dict[nn.Parameter, Tensor]] = {}
        self._references: list[_Reference] = []
        # by batch, and by version of the weights
        self._stand_ins: dict[int, dict[int, dict[nn.Parameter, nn.Parameter]]] = {}

    @property
    def held(self) -> int:
        """Versions held now: from the oldest that is still needed to the newest."""
        return self.newest - min(self._stash, default=self.newest) + 1

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trainable parameters of this rank, each once."""
        named = self._module.named_parameters()
        # averages of weights that hooks keep here may have lost their value: they follow other ranks' layers
        return (
            p
            for name, p in named
            if p.requires_grad and self._ownership.holds(name) and not isinstance(p, AbsentTensor)
        )

    # ------------------------------------------------------------------ computing with a version

    def _stand_in(self, parameter: nn.Parameter, version: int) -> nn.Parameter:
        if type(parameter) is not nn.Parameter:
            raise ConfigurationError(
                f"A parameter is a {type(parameter).__name__}; asynchronous schedules keep several versions of plain "
                "parameters alone.",
                hint="Use a schedule with a flush, such as '1f1b'.",
            )
        changed = (steps for steps in sorted(self._stash) if steps >= version and parameter in self._stash[steps])
        steps = next(changed, None)
        # .data, unlike detach(), does not count changes in place: those to the fresh memory are none to this version.
        leaf = nn.Parameter(parameter.data if steps is None else self._stash[steps][parameter])
        leaf.__dict__.update(parameter.__dict__)
        return leaf

    @contextmanager
    def using(self, batch: int, version: int) -> Iterator[None]:
        """Let all modules refer to a batch's own leaves with the values of a version."""
        known = self._stand_ins.setdefault(batch, {})
        if version not in known:
            known[version] = {parameter: self._stand_in(parameter, version) for parameter in self.parameters()}
        stand_ins = known[version]
        self._ownership.stand_ins = {id(leaf): parameter for parameter, leaf in stand_ins.items()}
        try:
            for reference in self._references:
                if reference.parameter in stand_ins:
                    _refer(reference, stand_ins[reference.parameter])
            yield
        finally:
            for reference in self._references:
                _refer(reference, reference.parameter)
            self._ownership.stand_ins = None

    # ------------------------------------------------------------------ calls and steps

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around the computations of a call: gradients may reach stand-ins, never parameters."""
        self._references = [
            _Reference(module, name, parameter)
            for module in self._module.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        own = list(self.parameters())
        before = [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        try:
            yield
            self._check_untouched(own)
        finally:
            for parameter, gradient in zip(own, before, strict=True):
                parameter.grad = gradient

    def _check_untouched(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                raise self._ownership.unnoticed(parameter)

    def collect(self, batches: Sequence[int]) -> None:
        """Add the gradients of batches, averaged over them, to those of the parameters.

        A batch steps after its last backward pass: its leaves, and the memory of their versions, go.
        """
        for stand_ins in (each for batch in batches for each in self._stand_ins.pop(batch, {}).values()):
            for parameter, leaf in stand_ins.items():
                if leaf.grad is not None:
                    gradient = leaf.grad
                    if len(batches) > 1:
                        gradient /= len(batches)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @torch.no_grad()
    def step(self, oldest: int) -> None:
        """An optimizer step is about to change the parameters.

        Args:
            oldest: the oldest version that is needed afterwards.
        """
        if oldest <= self.newest:
            self._stash[self.newest] = kept = {}
            for parameter in self.parameters():
                kept[parameter] = parameter.data
                parameter.data = parameter.data.clone()
        self.newest += 1
        for steps in [steps for steps in self._stash if steps < oldest]:
            del self._stash[steps]
        self.peak_held = max(self.peak_held, self.held)

    def restart(self) -> None:
        """The pipeline is empty: only the newest version is left, and counted as the first."""
        self._stash.clear()
        self._stand_ins.clear()
        self.newest = 0


def _refer(reference: _Reference, parameter: nn.Parameter) -> None:
    module = reference.module
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[reference.name] = parameter
    else:  # recurrent layers keep a list of their weights
        setattr(module, reference.name, parameter)
