"""Whatever a user does with a Trainer gives on two ranks what it gives on one plain device."""

from __future__ import annotations

import pytest

from tests.support import oracle
from tests.support.processes import run_trainers
from tests.support.trainer_runs import CASES, Outcome, fit, fits

RANKS = 2


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    """All cases in one world: starting processes costs more than most cases."""
    return run_trainers(fits, RANKS, timeout=240, names=list(CASES), devices=RANKS)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    plain = fit(CASES[name], devices=None)
    for process, of_process in enumerate(outcomes):
        if name not in of_process:
            pytest.skip("an earlier case failed")
        found = of_process[name]
        assert not found.error, f"process {process}: {found.error}"
        oracle.assert_equal(found.trace, _without_counters(plain.trace, found.trace), CASES[name].tolerance)
        assert found.rows == plain.rows
        assert found.optimizer_steps == plain.optimizer_steps


def _without_counters(plain: oracle.Trace, found: oracle.Trace) -> oracle.Trace:
    """A buffer that counts calls of the step counts micro-batches."""
    plain.weights["steps"] = found.weights["steps"]
    return plain
