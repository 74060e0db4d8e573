"""Finds one row and goes on for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.benchmarks.measure import Finding
from tests.gpu.setting import Setting


def run(setting: Setting) -> Iterator[Finding]:
    """One row."""
    yield Finding("a row", "1")
    time.sleep(1000)
