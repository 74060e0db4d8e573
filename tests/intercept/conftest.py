"""What the tests of the interception share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.small_net import RUNS


@pytest.fixture(params=RUNS, ids=lambda run: "-".join(map(str, run.values())))
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"layers": "layers", **request.param}
