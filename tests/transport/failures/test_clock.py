"""Times for which a process is suspended are not part of what it waits for others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_pipe.transport.failures import clock


def test_a_clock_does_not_count_suspensions(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.9, 600.0, 600.5, 602.0])
    # of this module alone: threads of earlier tests look at the time as well
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: next(times)))
    waits = clock.Clock(3.0)
    assert [waits.is_over() for _ in range(4)] == [False, False, False, True]
