"""The state that is read as memory is the one that `random.getstate` gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lightning_pipe.intercept import python_generator
from lightning_pipe.intercept.python_generator import GeneratorState

DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0.0, 1.0),  # made in pairs: the second is kept
    lambda: random.randint(1, 6),
    lambda: random.sample(range(1000), 700),
    lambda: random.seed(3),
]


@pytest.fixture(params=[True, False], ids=["memory", "getstate"])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GeneratorState:
    if not request.param:
        monkeypatch.setattr(python_generator, "_stands_in_object", lambda: False)
    return GeneratorState()


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("first", DRAWS)
def test_what_is_put_back_is_what_was_read(
    state: GeneratorState, first: Callable[[], object], draw: Callable[[], object]
) -> None:
    first()
    before, public = state.read(), random.getstate()
    drawn = [draw(), random.gauss(0.0, 1.0)]
    assert random.getstate() != public
    state.put_back(before)
    assert random.getstate() == public
    assert [draw(), random.gauss(0.0, 1.0)] == drawn


def test_the_memory_is_used_here() -> None:
    assert isinstance(GeneratorState().read()[0], bytes)


def test_another_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        __basicsize__ = object.__basicsize__ + 64

    monkeypatch.setattr(python_generator, "_Twister", Elsewhere)
    assert not python_generator._stands_in_object()
