"""What the tests of the interception share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.small_net import RUNS

# with several stages on a rank there are stages between others, too
FAST = [run for run in RUNS if run.get("ranks") != 4]
SLOW = [pytest.param(run, marks=pytest.mark.slow) for run in RUNS if run not in FAST]


@pytest.fixture(params=[*FAST, *SLOW], ids=lambda run: "-".join(map(str, run.values())))
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"layers": "layers", **request.param}
