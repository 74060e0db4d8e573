"""What the benchmarks have in common: findings with a target, paired comparisons, and their intervals."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # findings are imported without torch
    from lightning_pipe.transport.base import Transport


@dataclass(frozen=True)
class Finding:
    """One measured number.

    Args:
        name: what was measured.
        value: with its unit, as it is printed.
        target: what was asked for; empty if nothing was.
        reached: whether the target was reached; ``None`` without one.
    """

    name: str
    value: str
    target: str = ""
    reached: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "reached", False: "MISSED", None: ""}[self.reached]
        return f"  {self.name:<58} {self.value:<34} {self.target:<26} {verdict}".rstrip()


@dataclass(frozen=True)
class Ratio:
    """A paired comparison: the median of the rounds' ratios and its 95 % interval.

    Example:
        >>> Ratio.of([2.0, 2.2, 2.1], [1.0, 1.1, 1.0])
        Ratio(median=2.0, low=2.0, high=2.1)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float], resamples: int = 2000) -> Ratio:
        """The ratio of two quantities that were measured together in every round (bootstrap over the rounds)."""
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
        return cls(statistics.median(ratios), medians[int(0.025 * resamples)], medians[int(0.975 * resamples)])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def alternate(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Run both in every round, in turns A B, B A, so that what drifts meets both alike."""
    one, two = [], []
    for number in range(rounds):
        if number % 2:
            two.append(second())
            one.append(first())
        else:
            one.append(first())
            two.append(second())
    return one, two


def batch_seconds(transport: Transport, batch: Callable[[], object]) -> float:
    """Seconds from a barrier to the last rank's end; the same on all ranks."""
    transport.barrier()
    start = time.perf_counter()
    batch()
    everyone = tuple(range(transport.topology.world_size))
    return float(max(transport.all_gather_object(time.perf_counter() - start, everyone)))


def microseconds(seconds: float) -> str:
    """A duration as it is printed."""
    return f"{seconds * 1e6:.1f} us"
