"""Times for which a process is suspended are not part of what it waits for others."""

from __future__ import annotations

import time

import pytest

from lightning_pipe.transport.failures.clock import Clock


def test_a_clock_does_not_count_suspensions(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.9, 600.0, 600.5, 602.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    clock = Clock(3.0)
    assert [clock.is_over() for _ in range(4)] == [False, False, False, True]
