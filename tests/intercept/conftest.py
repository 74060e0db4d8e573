"""What the tests of the interception share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pairs import slow_but
from tests.support.small_net import RUNS

# where ranks have several stages there are stages between others, too, and each rank is before and behind the other
FAST = {"ranks": 2, "schedule": "interleaved"}


@pytest.fixture(params=slow_but(RUNS, FAST), ids=lambda run: "-".join(map(str, run.values())))
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"layers": "layers", **request.param}
