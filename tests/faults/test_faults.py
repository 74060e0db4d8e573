"""Runs with a fault end soon, wholly, with an exit code that says so, and with the reason told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.__main__ import line, printed
from tests.faults.catalogue import Fault, catalogue
from tests.faults.running import run

FAST = ("interrupt@middle:1",)
"""A run whose first process starts another one; tests of launcher, stops and meetings cover other kinds quickly."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in catalogue()]
)
def test_a_run_with_a_fault_ends_as_it_should(name: str) -> None:
    ended = run(catalogue()[name], copied=name in FAST)
    assert not ended.problems(), f"{line(ended)}\n{printed(ended)}"


RUNS, AT_ONCE = 100, 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_short_runs_end_without_a_crash() -> None:
    """Several at once on few cores: threads that come back late find an interpreter that is ending."""
    nothing = Fault("nothing", "teardown", 0, told="", codes=(0,), within=60.0)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for ended in pool.map(run, [nothing] * RUNS):
            assert not ended.problems(), f"{line(ended)}\n{printed(ended)}"
