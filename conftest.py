"""What the doctests of all packages share."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples where there are some: every module would be imported, and all that it has looked through."""
    found = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text():
        return [each for each in found if not isinstance(each, DoctestModule)]
    return found


@pytest.fixture(autouse=True)
def examples_register_nothing_for_good(request: pytest.FixtureRequest) -> Iterator[None]:
    """A schedule that an example registers is gone with the example: its names are not there any more either."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    from lightning_pipe.schedules import registry

    before = dict(registry._families)
    yield
    registry._families.clear()
    registry._families.update(before)
