"""Several versions of a rank's weights at once, for batches whose forward and backward passes lie between steps.

The optimizer changes parameters in place while batches are in flight. So before a step that would change a version
which is still needed, the parameters move to fresh memory, and the version keeps the memory that they had. Whenever a
batch computes, forward or backward, the parameters lie in the memory of its version and have its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.torch_internals import set_version_counter

Memory = dict[nn.Parameter, tuple[Tensor, int]]
"""Where parameters have their values, and how often autograd has seen these change: graphs that hold them compare."""


class WeightVersions:
    """The versions of the weights that a rank holds, counted in steps since the pipeline was last empty.

    Buffers have one version: running statistics are not stashed. Source: PipeDream, section 3.3.

    Args:
        module: the user's module.
        ownership: knows which parameters this rank holds.

    Attributes:
        newest: steps that the parameters have seen.
        stash: by their numbers, the earlier versions that are still needed.
    """

    def __init__(self, module: nn.Module, ownership: Ownership) -> None:
        self._module, self._ownership = module, ownership
        self.newest, self._used = 0, -1
        self._trained: list[nn.Parameter] = []
        self.stash: dict[int, Memory] = {}
        self._gradients: dict[int, dict[nn.Parameter, Tensor]] = {}  # by batch

    def begin_call(self) -> None:
        """Find the trainable parameters of this rank: hooks may have added, frozen or thawed some.

        Raises:
            ConfigurationError: one is of a class of its own, which may have its values elsewhere.
        """
        # averages of weights that hooks keep here may have lost their value: they follow other ranks' layers
        self._trained = [
            parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and self._ownership.holds(name) and not isinstance(parameter, AbsentTensor)
        ]
        for kind in {type(parameter) for parameter in self._trained} - {nn.Parameter}:
            raise ConfigurationError(
                f"A parameter is a {kind.__name__}; asynchronous schedules keep several versions of plain parameters "
                "alone.",
                hint="Use a schedule with a flush, such as '1f1b'.",
            )

    @contextmanager
    def using(self, batch: int, version: int) -> Iterator[None]:
        """Let the parameters have the values of a version and the gradients of a batch."""
        gradients, self._used = self._gradients.setdefault(batch, {}), max(version, self._used)
        former = [(parameter, parameter.grad) for parameter in self._trained]
        memory: Memory = {}
        for steps in sorted(self.stash, reverse=True):
            if steps >= version:
                memory |= self.stash[steps]
        newest = _memory_of(memory)
        for parameter, _ in former:
            parameter.grad = gradients.get(parameter)
        _move(memory)
        try:
            yield
        finally:
            _move(newest)
            for parameter, gradient in former:
                if parameter.grad is not None:
                    gradients[parameter] = parameter.grad
                parameter.grad = gradient

    def collect(self, batches: Sequence[int]) -> None:
        """Add the gradients of batches, averaged over them, to those of the parameters."""
        for gradients in (self._gradients.pop(batch, {}) for batch in batches):
            for parameter, gradient in gradients.items():
                mean = gradient.div_(len(batches)) if len(batches) > 1 else gradient
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    @torch.no_grad()
    def keep(self, oldest: int, *, steps: bool) -> None:
        """The optimizer, or without its step a hook, may change the parameters, in which batches under way compute.

        Args:
            oldest: the oldest version that is needed afterwards.
            steps: whether the optimizer steps; what hooks change without a step belongs to the next version, too.
        """
        if oldest <= self.newest and (steps or self._used == self.newest):
            kept = self.stash.setdefault(self.newest, {})
            for parameter in (each for each in self._trained if each not in kept):
                kept |= _memory_of([parameter])
                parameter.data = parameter.data.clone()
        self.newest += steps
        self.stash = {version: memory for version, memory in self.stash.items() if version >= oldest}

    def restart(self) -> None:
        """The pipeline is empty: only the newest version is left, and counted as the first."""
        self.stash.clear()
        self._gradients.clear()
        self.newest, self._used = 0, -1


def _memory_of(parameters: Iterable[nn.Parameter]) -> Memory:
    return {parameter: (parameter.data, parameter._version) for parameter in parameters}


def _move(memory: Memory) -> None:
    """Let parameters lie somewhere else."""
    if memory:
        for parameter, (data, _) in memory.items():
            parameter.data = data
        set_version_counter(tuple(memory), tuple(changes for _, changes in memory.values()))
        torch.clear_autocast_cache()  # has what it has made of parameters by the objects, which are the same
