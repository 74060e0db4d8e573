"""Several stages on one device: the models of the zoo in float64, without a Trainer and under one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_pipe import PipeStrategy
from tests.benchmarks.measure import Finding
from tests.gpu.rows import compared, moved_trace, on_device
from tests.gpu.setting import Setting
from tests.support import equality_sweep, oracle
from tests.support.equality_sweep import Point
from tests.support.model_zoo import ZOO, Entry
from tests.support.trainer_runs import quiet
from tests.support.zoo.base import BATCH

_POINTS = (Point("1f1b", 4, 3, ranks=1), Point("zero_bubble", 2, 3, ranks=1))
_RECOMPUTED = Point("gpipe", 4, 3, ranks=1, recompute="always")
_UNDER_A_TRAINER = ("residual", "tied_to_layers", "gpt2")
_SMALL = ("residual", "skips")


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each model."""
    quiet()
    for name, entry in ZOO.items():
        if entry.threads and (not setting.small or name in _SMALL):
            points = (*_POINTS, _RECOMPUTED) if entry.main else _POINTS[:1]
            yield from _rows(name, on_device(entry, setting.place), setting, points)


def _rows(name: str, entry: Entry, setting: Setting, points: tuple[Point, ...]) -> Iterator[Finding]:
    for point in points:
        if point.micro_batches * entry.fewest <= BATCH:
            yield compared(f"{name}, {point}", partial(_differences, entry, point, setting))
    if name in _UNDER_A_TRAINER:
        yield compared(f"{name}, under a Trainer", partial(_under_a_trainer, entry, setting))


def _differences(entry: Entry, point: Point, setting: Setting) -> list[str]:
    expected = equality_sweep.expected(entry, point)
    return oracle.differences(equality_sweep.pipelined(entry, point, setting.place), expected)


def _under_a_trainer(entry: Entry, setting: Setting) -> list[str]:
    options: dict[str, Any] = {"accelerator": setting.accelerator}
    expected = oracle.train_with_lightning(entry, micro_batches=3, validation=2, **options)
    strategy = PipeStrategy(stages=4, micro_batches=3, layers=entry.layers)
    batches, more = entry.batches(3), entry.batches(2)
    with contextlib.redirect_stdout(io.StringIO()):  # the plan
        found = oracle.fit(entry.build(), batches, validation=more, strategy=strategy, **options)
    # a plain Trainer leaves the module on the CPU
    return oracle.differences(moved_trace(found), moved_trace(expected))
