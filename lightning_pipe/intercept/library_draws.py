"""Who draws from the global generators of Python and NumPy: to save and to restore them takes longer than a layer."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

_BATCHES = 3
_python, _numpy = random.Random(), np.random.RandomState()

_States = tuple[tuple[Any, ...], dict[str, Any]]


def states() -> _States:
    """The states of both generators, to be restored here or in another process; those of NumPy compare once pickled."""
    return random.getstate(), np.random.get_state(legacy=False)


def restore(states: _States) -> None:
    """Restore what `states` has returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def seed_both(seed: int) -> None:
    """Seed both generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


def moved_since(seed: int) -> bool:
    """Whether numbers have been drawn since both generators were seeded. Draws from them."""
    _python.seed(seed)
    _numpy.seed(seed & 0xFFFF_FFFF)
    return _python.getrandbits(64) != random.getrandbits(64) or _numpy.random_sample() != np.random.random_sample()


class LibraryDraws:
    """What one rank has seen of its calls, in training or in evaluations.

    A call that has drawn nothing in its first three batches is left alone from then on, as long as the code around the
    layers draws nothing either. Both generators must then be, at the end of a run, as they were seeded at its
    beginning. If they are not, a layer has begun to draw, or the code around them, or another thread of this process.
    From the next batch on nothing is left alone. In the run itself the first to draw has the run's first numbers, on
    whichever stage it is; what draws behind it has gone on from there, if both are on the same one.

    Args:
        layers: how many there are.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._begun, self._leaves_alone = 0, True
        self._watched: dict[int, set[int]] = {}
        self._drawing: set[int] = set()

    @property
    def any(self) -> bool:
        """Whether any code has been seen to draw."""
        return bool(self._drawing) or not self._leaves_alone

    def begin_batch(self) -> tuple[int, frozenset[int]]:
        """The number of the batch that begins, and the calls that are left alone in it: second runs do as the first."""
        self._begun += 1
        if not self._leaves_alone:
            return self._begun, frozenset()
        seen = {call for call, batches in self._watched.items() if len(batches) >= _BATCHES}
        return self._begun, frozenset(seen - self._drawing)

    def call_of(self, key: tuple[int, ...]) -> int | None:
        """The number of the layer whose call has a key, or that of a module outside them; ``None`` of other code."""
        if len(key) > 1:
            return None
        return key[0] % self._layers if key[0] >= 0 else key[0]

    def watch(self, call: int, batch: int, seed: int) -> None:
        """A call that was not left alone ends; ``seed`` is what it began with."""
        batches = self._watched.setdefault(call, set())
        if len(batches) < _BATCHES:
            batches.add(batch)
            if moved_since(seed):
                self._drawing.add(call)

    def end_run(self, seed: int) -> None:
        """A run of the step ends; ``seed`` is what it began with."""
        self._leaves_alone &= not moved_since(seed)
