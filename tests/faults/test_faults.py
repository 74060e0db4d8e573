"""Runs with a fault end soon, wholly, with an exit code that says so, and with the reason told."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import line, printed
from tests.faults.catalogue import catalogue
from tests.faults.running import run

FAST = ("raise@fit_end:1",)
"""Real runs of several processes; tests of the launcher, of stopping and of meetings cover other kinds quickly."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in catalogue()]
)
def test_a_run_with_a_fault_ends_as_it_should(name: str) -> None:
    ended = run(catalogue()[name])
    assert not ended.problems(), f"{line(ended)}\n{printed(ended)}"
