"""Several stages on one device: the models of the zoo in float64, without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.benchmarks.measure import Finding
from tests.gpu.rows import PLACE, compared, on_device
from tests.gpu.setting import Setting
from tests.support import equality_sweep, oracle
from tests.support.equality_sweep import Point
from tests.support.model_zoo import ZOO, Entry
from tests.support.zoo.base import BATCH

_POINTS = (Point("1f1b", 4, 3, ranks=1), Point("zero_bubble", 2, 3, ranks=1))
_RECOMPUTED = Point("gpipe", 4, 3, ranks=1, recompute="always")
_SMALL = ("residual", "skips")


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each model."""
    for name, entry in ZOO.items():
        if entry.threads and (not setting.small or name in _SMALL):
            points = (*_POINTS, _RECOMPUTED) if entry.main else _POINTS[:1]
            yield from _rows(name, on_device(entry, PLACE), points)


def _rows(name: str, entry: Entry, points: tuple[Point, ...]) -> Iterator[Finding]:
    for point in points:
        if point.micro_batches * entry.fewest <= BATCH:
            yield compared(f"{name}, {point}", partial(_differences, entry, point))


def _differences(entry: Entry, point: Point) -> list[str]:
    expected = equality_sweep.expected(entry, point)
    return oracle.differences(equality_sweep.pipelined(entry, point, PLACE), expected)
