"""Who draws from the global generators of Python and NumPy: to save and to restore them takes longer than a layer."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from lightning_pipe.errors import CutError

_BATCHES = 3
_AROUND = None
"""Stands for the code around the layers, among the numbers of calls."""
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
    From the next batch on nothing is left alone, so all that is drawn is right again. What was drawn in the run itself
    depends on the division only if two have begun to draw in it: the first has drawn the run's first numbers, on
    whichever stage it is; the second has gone on behind it only if both are on the same one.

    Args:
        names: the layers, by their number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._begun, self._leaves_alone = 0, True
        self._watched: dict[int, set[int]] = {}
        self._drawing: set[int] = set()
        # for each run at whose end the generators had moved: calls that it left alone, and those seen to draw since
        self._doubts: list[tuple[set[int | None], set[int | None]]] = []

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
        return key[0] % len(self._names) if key[0] >= 0 else key[0]

    def watch(self, call: int, batch: int, seed: int) -> None:
        """A call that was not left alone ends; ``seed`` is what it began with."""
        batches = self._watched.setdefault(call, set())
        if len(batches) >= _BATCHES and not self._doubts:
            return
        batches.add(batch)
        self._note(call, moved_since(seed))

    def end_run(self, seed: int, left_alone: Collection[int]) -> None:
        """A run of the step ends.

        Args:
            seed: what it began with.
            left_alone: the calls that were left alone in it.

        Raises:
            CutError: numbers that an earlier run has drawn depended on the division.
        """
        moved = moved_since(seed)
        if left_alone and moved:
            self._doubts.append(({*left_alone, _AROUND}, set()))
        elif not left_alone:
            self._note(_AROUND, moved)
        self._leaves_alone &= not moved
        for drawing in (drawing for _, drawing in self._doubts if len(drawing) > 1):
            raise CutError(
                f"{' and '.join(sorted(map(self._name, drawing)))} draw from Python's or NumPy's random numbers, and "
                f"have not done so in their first {_BATCHES} batches. What they have drawn in one run since then "
                "depends on the division into stages.",
                hint="Draw a number there in every batch, even if it is not used; or draw from torch.rand. Another "
                "thread of the process needs a generator of its own: random.Random().",
            )
        self._doubts = [(unseen, drawing) for unseen, drawing in self._doubts if unseen]

    def _note(self, call: int | None, drew: bool) -> None:
        if drew and call is not None:
            self._drawing.add(call)
        for unseen, drawing in self._doubts:
            if call in unseen:
                unseen.remove(call)
                drawing.update({call} if drew else ())

    def _name(self, call: int | None) -> str:
        if call is None:
            return "the code around the layers"
        return f"layer '{self._names[call]}'" if call >= 0 else "a module outside the layers"
