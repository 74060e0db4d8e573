"""As many ranks as there are devices, over NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.measure import Finding
from tests.gpu.over_processes import equal
from tests.gpu.rows import not_run
from tests.gpu.setting import Setting
from tests.support.equality_sweep import Point

_MOST = 4
"""Layers of the smallest models."""


def runs(devices: int) -> list[tuple[str, Point]]:
    """What is trained on a number of devices."""
    ranks = min(devices, _MOST)
    found = [
        ("residual", Point("1f1b", ranks, 4)),
        ("gpt2", Point("1f1b", min(2, ranks), 4)),
        ("tied_to_layers", Point("zero_bubble", ranks, 4)),
        ("odd_batches", Point("gpipe", ranks, 3, evaluate=True)),
        ("residual", Point("1f1b", 1, 3, replicas=ranks)),
    ]
    if ranks % 2 == 0:
        found += [("skips", Point("chimera", ranks, 4)), ("residual", Point("gems", ranks, 4, accumulate=2))]
    return found


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each model."""
    if setting.devices < 2:
        yield not_run("ranks over NCCL", "NCCL needs a device for each rank; there is one")
        return
    chosen = runs(setting.devices)
    yield from equal(chosen[:1] if setting.small else chosen, "nccl")
