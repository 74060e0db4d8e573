"""The largest AmoebaNet-D on one accelerator (GPipe, Table 1)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.measure import Finding
from tests.gpu.largest_model import amoebanet, rows
from tests.gpu.setting import Setting


def run(setting: Setting) -> Iterator[Finding]:
    """The rows of both limits."""
    yield from rows(amoebanet(setting.small), setting)
