"""The global generators of random numbers, and who draws from them: to save and restore them takes time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.tensor_spec import numbered
from lightning_pipe.torch_internals import first_position, position_of

_BATCHES = 3
_python, _numpy = random.Random(), np.random.RandomState()


class TorchGenerators:
    """Those of torch: the CPU's, and on a GPU that of the device.

    Args:
        device: where the layers run.

    Attributes:
        all: the generators.
    """

    def __init__(self, device: torch.device) -> None:
        self.all = [torch.default_generator]
        if device.type == "cuda":
            self.all.append(torch.cuda.default_generators[numbered(device).index])

    def states(self) -> list[Tensor]:
        """Their states, to be restored here or in another process."""
        return [each.get_state() for each in self.all]

    def restore(self, states: Any) -> None:
        """Restore what `states` has returned."""
        for generator, state in zip(self.all, states, strict=True):
            generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        for generator in self.all:
            generator.manual_seed(seed)

    def moved_since(self, seed: int) -> bool:
        """Whether numbers have been drawn since they were seeded."""
        return any(each.initial_seed() != seed or position_of(each) != first_position(each.device) for each in self.all)


class LibraryGenerators:
    """Those of Python and of NumPy; see `TorchGenerators`. What NumPy's state is compares once pickled."""

    def states(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Their states."""
        return random.getstate(), np.random.get_state(legacy=False)

    def restore(self, states: Any) -> None:
        """Restore what `states` has returned."""
        random.setstate(states[0])
        np.random.set_state(states[1])

    def seed(self, seed: int) -> None:
        """Seed both."""
        random.seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)

    def moved_since(self, seed: int) -> bool:
        """Whether numbers have been drawn since they were seeded. Draws one of each."""
        _python.seed(seed)
        _numpy.seed(seed & 0xFFFF_FFFF)
        return _python.getrandbits(64) != random.getrandbits(64) or _numpy.random_sample() != np.random.random_sample()


class Draws:
    """What one rank has seen of its calls' draws from some generators, in training or in evaluations.

    A call that has drawn nothing in its first three batches is left alone from then on, as long as the code around the
    layers draws nothing either. The generators must then be, at the end of a run, as they were seeded at its beginning.
    If they are not, a layer has begun to draw, or the code around them, or another thread of this process. From the
    next batch on nothing is left alone. In the run itself the first to draw has the run's first numbers, on whichever
    stage it is; what draws behind it has gone on from there, if both are on the same one.

    Args:
        generators: the generators.

    Attributes:
        generators: as given.
    """

    def __init__(self, generators: TorchGenerators | LibraryGenerators) -> None:
        self.generators = generators
        self._begun, self._leaves_alone = 0, True
        self._watched: dict[int, set[int]] = {}
        self._drawing: set[int] = set()

    def begin_batch(self) -> tuple[int, frozenset[int]]:
        """The number of the batch that begins, and the calls that are left alone in it: second runs do as the first."""
        self._begun += 1
        if not self._leaves_alone:
            return self._begun, frozenset()
        seen = {call for call, batches in self._watched.items() if len(batches) >= _BATCHES}
        return self._begun, frozenset(seen - self._drawing)

    def watch(self, call: int, batch: int, seed: int) -> None:
        """A call that was not left alone ends; ``seed`` is what it began with."""
        batches = self._watched.setdefault(call, set())
        if len(batches) < _BATCHES:
            batches.add(batch)
            if self.generators.moved_since(seed):
                self._drawing.add(call)

    def end_run(self, seed: int) -> None:
        """A run of the step ends; ``seed`` is what it began with."""
        self._leaves_alone = self._leaves_alone and not self.generators.moved_since(seed)


def all_draws(device: torch.device) -> list[Draws]:
    """Nothing seen yet of the calls: from torch's generators, and from those of libraries."""
    return [Draws(TorchGenerators(device)), Draws(LibraryGenerators())]
