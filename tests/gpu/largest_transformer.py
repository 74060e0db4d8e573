"""The largest Transformer-L on one accelerator (GPipe, Table 1)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.measure import Finding
from tests.gpu.largest_model import rows, transformer
from tests.gpu.setting import Setting


def run(setting: Setting) -> Iterator[Finding]:
    """The rows of both limits."""
    yield from rows(transformer(setting.small), setting)
