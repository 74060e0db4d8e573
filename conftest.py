"""What the doctests of all packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


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
