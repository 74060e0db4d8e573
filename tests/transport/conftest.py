"""What the tests of transports share."""

from __future__ import annotations

import functools

import pytest

from tests.support import processes
from tests.support.transports import LOCAL, Run, run_in_threads


@pytest.fixture(params=["threads", *LOCAL])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "threads":
        return run_in_threads
    return functools.partial(processes.run_pipeline, local=LOCAL[request.param])
