"""The state that is read as memory is the one that `numpy.random.get_state` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lightning_pipe.intercept import numpy_generator
from lightning_pipe.intercept.numpy_generator import NumpyState

DRAWS: list[Callable[[], object]] = [
    np.random.random,
    np.random.normal,  # made in pairs: the second is kept
    lambda: np.random.randint(1, 6),
    lambda: np.random.permutation(700).tolist(),
    lambda: np.random.seed(3),
]


@pytest.fixture(params=[True, False], ids=["memory", "get_state"])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NumpyState:
    if not request.param:
        monkeypatch.setattr(numpy_generator, "_place_of_kept", lambda: None)
    return NumpyState()


def public() -> tuple[Any, ...]:
    """Without the kept number where none is kept: it has no meaning then."""
    name, words, place, kept, number = np.random.get_state()  # type: ignore[misc]
    return name, words.tolist(), place, kept, number if kept else None


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("first", DRAWS)
def test_what_is_put_back_is_what_was_read(
    state: NumpyState, first: Callable[[], object], draw: Callable[[], object]
) -> None:
    first()
    before, seen = state.read(), public()
    drawn = [draw(), np.random.normal(), np.random.random()]
    assert public() != seen
    state.put_back(before)
    assert public() == seen
    assert [draw(), np.random.normal(), np.random.random()] == drawn


def test_a_kept_number_is_told_apart(state: NumpyState) -> None:
    """To take it changes no word."""
    np.random.seed(0)
    np.random.normal()
    before = state.read()
    taken = np.random.normal()
    state.put_back(before)
    assert np.random.normal() == taken


def test_the_memory_is_used_here() -> None:
    assert isinstance(NumpyState().read()[0], bytes)


@pytest.fixture
def another_generator() -> Iterator[None]:
    before: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("another_generator")
def test_another_kind_of_generator_is_put_back(state: NumpyState) -> None:
    before = state.read()
    drawn = np.random.normal()
    state.put_back(before)
    assert np.random.normal() == drawn


def test_a_state_of_another_kind_is_refused_as_numpy_does() -> None:
    state = NumpyState()
    before = state.read()
    kept: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        with pytest.raises(ValueError, match="state must be for a PCG64 RNG"):
            state.put_back(before)
    finally:
        np.random.set_bit_generator(kept)  # type: ignore[attr-defined]


def test_another_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_generator, "_KEPT", numpy_generator.struct.Struct("=i12xd"))
    assert numpy_generator._place_of_kept() is None
