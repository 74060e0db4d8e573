"""Reads and puts back the state of NumPy's global generator, around every batch: as memory, for speed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

_numpy: Any = np.random  # its types leave out how generators are exchanged (numpy 2.4)
_WORDS = 624 * 4 + 4
"""Bytes of a Mersenne twister: its words, and the place of the next one."""
_KEPT = struct.Struct("=i4xd")
"""In a ``RandomState``: whether the second of a pair of normal numbers is kept, and that number."""


class NumpyState:
    """The state of the generator behind the functions of `numpy.random`.

    ``get_state`` and ``set_state`` take 30 microseconds each, as they go through the 624 words one by one (numpy 2.4).
    The words stand where the generator's own interface for C says. What is kept of a pair of normal numbers stands in
    the object behind the functions; a trial finds out where. Where it finds nothing, and for generators other than the
    default one, ``get_state`` and ``set_state`` are used.

    Attributes:
        read: returns the state.
        put_back: takes a state that ``read`` has returned, in this process or in another.

    Example:
        >>> state = NumpyState()
        >>> before = state.read()
        >>> number = np.random.normal()
        >>> state.put_back(before)
        >>> number == np.random.normal()
        True
    """

    read: Callable[[], Any]
    put_back: Callable[[Any], None]

    def __init__(self) -> None:
        offset = _place_of_kept()
        if offset is None:
            self.read, self.put_back = _get_state, np.random.set_state
        else:
            self._kept = _view(np.random.get_state.__self__, offset)  # type: ignore[attr-defined]
            self.read, self.put_back = self._copy, self._overwrite

    def _copy(self) -> Any:
        generator = _numpy.get_bit_generator()
        if type(generator) is not np.random.MT19937:
            return _get_state()
        return ctypes.string_at(generator.ctypes.state_address, _WORDS), self._kept.raw

    def _overwrite(self, state: Any) -> None:
        generator = _numpy.get_bit_generator()
        if _is_memory(state) and type(generator) is np.random.MT19937:
            words, self._kept.raw = state
            ctypes.memmove(generator.ctypes.state_address, words, _WORDS)
        else:
            np.random.set_state(_public(state))


def _get_state() -> Any:
    """The state in numpy's words: a tuple of the default generator's, a dictionary of others'."""
    return _numpy.get_state(legacy=type(_numpy.get_bit_generator()) is np.random.MT19937)


def _is_memory(state: Any) -> bool:
    return isinstance(state, tuple) and isinstance(state[0], bytes)


def _public(state: Any) -> Any:
    """A state as ``set_state`` takes it."""
    if not _is_memory(state):
        return state
    words = np.frombuffer(state[0], dtype=np.uint32)
    return "MT19937", words[:-1], int(words[-1]), *_KEPT.unpack(state[1])


def _view(owner: Any, offset: int) -> Any:
    return (ctypes.c_char * _KEPT.size).from_address(id(owner) + offset)


def _place_of_kept() -> int | None:
    """Where a ``RandomState`` keeps the second of a pair of normal numbers; ``None`` if a trial does not show it."""
    generator = np.random.MT19937(1)
    trial = np.random.RandomState(generator)
    trial.standard_normal()
    before: Any = trial.get_state()
    content = ctypes.string_at(id(trial), type(trial).__basicsize__)
    offset = content.find(_KEPT.pack(1, before[4]))
    if offset < 0 or not _same(before, _read(generator, trial, offset)):
        return None
    trial.standard_normal()  # the one that was kept
    return offset if _same(trial.get_state(), _read(generator, trial, offset)) else None


def _read(generator: Any, trial: Any, offset: int) -> Any:
    words = ctypes.string_at(generator.ctypes.state_address, _WORDS)
    return _public((words, _view(trial, offset).raw))


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one[1], other[1])) and one[2:4] == other[2:4] and (not one[3] or one[4] == other[4])
