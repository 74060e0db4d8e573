"""A run warns once for each key."""

from __future__ import annotations

import pytest

from lightning_pipe.warn_once import WarnOnce


def test_each_key_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_pipe.warn_once.rank_zero_warn", told.append)
    warn = WarnOnce()
    for key, message in (("a", "first"), ("a", "first again"), ("b", "second")):
        warn(key, message)
    WarnOnce()("a", "another run")
    assert told == ["first", "second", "another run"]
