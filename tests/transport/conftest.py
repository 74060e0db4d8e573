"""What the tests of transports share."""

from __future__ import annotations

import functools

import pytest

from tests.support import processes
from tests.support.pairs import slow_but
from tests.support.transports import EVERY, LOCAL, Run, run_in_threads


@pytest.fixture(params=slow_but(EVERY, "threads", "local"))
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "threads":
        return run_in_threads
    return functools.partial(processes.run_pipeline, local=LOCAL[request.param])
