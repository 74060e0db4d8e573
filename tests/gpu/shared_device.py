"""Two processes share one device: messages go through pinned host memory, over Gloo."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.measure import Finding
from tests.gpu.over_processes import equal
from tests.gpu.setting import Setting
from tests.support.equality_sweep import Point

RUNS = (
    ("residual", Point("1f1b", 2, 3)),
    ("gpt2", Point("1f1b", 2, 4)),
    ("tied_to_layers", Point("zero_bubble", 2, 3)),
    ("skips", Point("chimera", 2, 4)),
    ("mlp", Point("interleaved", 4, 3)),
    ("odd_batches", Point("gpipe", 2, 3, evaluate=True)),
    ("residual", Point("1f1b", 1, 3, replicas=2)),
)


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each model."""
    yield from equal(RUNS[:1] if setting.small else RUNS, "gloo")
