"""Random streams that do not depend on which rank computes what.

Every rank runs the user's step, so code outside layers must draw the same numbers everywhere, while each layer draws
numbers of its own. All streams derive from the batch's seed, the micro-batch and a key, never from what ran before.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.intercept.numpy_generator import NumpyState
from lightning_pipe.intercept.python_generator import GeneratorState
from lightning_pipe.tensor_spec import numbered

_python, _of_numpy = GeneratorState(), NumpyState()


def mix(*parts: int) -> int:
    """A seed derived from integers, the same in every process (hashes of integer tuples are not salted).

    Example:
        >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
        (True, False)
    """
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


# torch holds a generator's mutex while it makes the tensor of its state, which may collect garbage and give the
# interpreter to another thread; one that then waits for the mutex keeps the interpreter, for ever (torch 2.13). Only
# ranks that are threads meet there.
_ONE_AT_A_TIME = threading.Lock()


def _states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    with _ONE_AT_A_TIME:
        return [generator.get_state() for generator in generators]


def _seed(generators: Sequence[torch.Generator], seed: int) -> None:
    with _ONE_AT_A_TIME:
        for generator in generators:
            generator.manual_seed(seed)


def _seed_all(generators: Sequence[torch.Generator], seed: int) -> None:
    """Seed these generators of torch, Python's and numpy's."""
    _seed(generators, seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


def _restore(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    with _ONE_AT_A_TIME:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class _Isolated:
    """Gives the code inside its own stream and puts the surrounding stream back. A class, for speed."""

    __slots__ = ("_generators", "_numpy", "_python", "_seed", "_states")

    def __init__(self, generators: list[torch.Generator], seed: int) -> None:
        self._generators, self._seed = generators, seed

    def __enter__(self) -> None:
        self._states, self._python, self._numpy = _states(self._generators), _python.read(), _of_numpy.read()
        _seed_all(self._generators, self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _restore(self._generators, self._states)
        _python.put_back(self._python)
        _of_numpy.put_back(self._numpy)


class RandomStreams:
    """The random streams of one batch.

    Micro-batches are numbered over all replicas, in the order in which samples are dealt out to them: masks do not
    depend on how many replicas share the micro-batches.

    Args:
        seed: the batch's seed, the same on all ranks of all pipelines.
        device: where the layers run; its generator is seeded beside the CPU's.
        replica: the number of this pipeline among those side by side.
        replicas: how many there are.
    """

    def __init__(self, seed: int, device: torch.device, replica: int = 0, replicas: int = 1) -> None:
        self.seed, self._replica, self._replicas = seed, replica, replicas
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[numbered(device).index])

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators of torch that code outside layers draws from."""
        return tuple(self._generators)

    def isolated(self, micro_batch: int, *key: int) -> _Isolated:
        """A context with the stream of ``key``; the stream outside goes on as if nothing had happened."""
        return _Isolated(self._generators, mix(self.seed, self._number(micro_batch), *key))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Put all generators back after a batch: torch's, Python's and numpy's."""
        # Always: each run of the step has seeded them, drawn from or not, and whether code outside drew since the last
        # batch is in the state alone.
        states, python, of_numpy = _states(self._generators), _python.read(), _of_numpy.read()
        try:
            yield
        finally:
            _restore(self._generators, states)
            _python.put_back(python)
            _of_numpy.put_back(of_numpy)

    def seed_user_code(self, micro_batch: int) -> None:
        """Start the stream of the user's code outside layers for one run over ``micro_batch``."""
        _seed_all(self._generators, mix(self.seed, self._number(micro_batch)))

    def state(self) -> tuple[Any, ...]:
        """The state of all generators, to be compared: whether numbers have been drawn."""
        of_torch = tuple(state.numpy().tobytes() for state in _states(self._generators))
        return of_torch, _python.read(), repr(_of_numpy.read())

    def _number(self, micro_batch: int) -> int:
        return micro_batch * self._replicas + self._replica
