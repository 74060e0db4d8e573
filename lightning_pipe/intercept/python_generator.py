"""Reads and puts back the state of Python's generator, before and after every layer: as memory, for speed."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

_Twister: Any = random.Random.__base__
"""The type that holds the words."""


class GeneratorState:
    """The state of a generator of the standard library.

    ``getstate`` makes a Python integer of each of its 624 words, which takes 12 microseconds, more than all other
    generators of a layer together. The words stand in the object itself, behind its header (CPython 3.11 to 3.13)::

        object:  [ header | index | 624 words of 32 bits ]      __dict__:  gauss_next
                          '-------- `view` --------------'

    Where a trial shows that they do not, ``getstate`` and ``setstate`` are used.

    Args:
        generator: the generator; by default the one behind the functions of `random`.

    Attributes:
        read: returns the state.
        put_back: takes a state that ``read`` has returned.

    Example:
        >>> state = GeneratorState()
        >>> before = state.read()
        >>> number = random.random()
        >>> state.put_back(before)
        >>> number == random.random()
        True
    """

    read: Callable[[], Any]
    put_back: Callable[[Any], None]

    def __init__(self, generator: random.Random | None = None) -> None:
        self._generator: random.Random = generator or random.getstate.__self__  # type: ignore[attr-defined]
        if _stands_in_object():
            self._view = _view(self._generator)
            self.read, self.put_back = self._copy, self._overwrite
        else:
            self.read, self.put_back = self._generator.getstate, self._generator.setstate

    def _copy(self) -> tuple[bytes, float | None]:
        return self._view.raw, self._generator.gauss_next  # type: ignore[attr-defined]

    def _overwrite(self, state: tuple[bytes, float | None]) -> None:
        self._view.raw, self._generator.gauss_next = state  # type: ignore[attr-defined]


def _view(generator: random.Random) -> Any:
    size = _Twister.__basicsize__ - object.__basicsize__
    return (ctypes.c_char * size).from_address(id(generator) + object.__basicsize__)


def _stands_in_object() -> bool:
    """Whether a generator whose memory is put back draws the same numbers again, from the same state."""
    trial = random.Random(1)
    before = trial.getstate()
    try:
        view = _view(trial)
        words = view.raw
        for _ in range(700):  # past the last word, where all words are made anew
            trial.random()
        drawn = trial.getstate() != before
        view.raw = words
    except (AttributeError, TypeError, ValueError):
        return False
    return drawn and trial.getstate() == before
