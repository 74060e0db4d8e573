"""Parameters of which only some are among the fast tests, alone and in pairs of two kinds; and those that will run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Each value, slow unless it is one of ``fast``. A tuple is several parameters."""
    return [value if value in fast else pytest.param(*_several(value), marks=pytest.mark.slow) for value in values]


def asked(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """What tests of the fixture's module will be given for a parameter, or for several as tuples; each once.

    For fixtures that do in one world of processes what all of them need.
    """
    found: list[Any] = []
    for item in request.session.items:
        given = item.callspec.params if item.parent is request.node and hasattr(item, "callspec") else {}
        if given.keys() >= {*names}:
            values = tuple(given[name] for name in names)
            found.append(values if len(names) > 1 else values[0])
    return [value for place, value in enumerate(found) if value not in found[:place]]


def with_the_first(one: int, other: int) -> bool:
    """Each other with the first one, and each one with the first other."""
    return 0 in (one, other)


def every_second(one: int, other: int) -> bool:
    """Half of the pairs, with each one and each other among them."""
    return (one + other) % 2 == 0


def pairs(ones: Sequence[Any], others: Sequence[Any], fast: Callable[[int, int], bool] = with_the_first) -> list[Any]:
    """Each one with each other, slow unless ``fast`` by their places. A tuple is several parameters."""
    found = []
    for place, one in enumerate(ones):
        for behind, other in enumerate(others):
            values = (*_several(one), *_several(other))
            marks = () if fast(place, behind) else pytest.mark.slow
            found.append(pytest.param(*values, id="-".join(map(_named, values)), marks=marks))
    return found


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _named(value: Any) -> str:
    return getattr(value, "__name__", str(value))
