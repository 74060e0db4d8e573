"""The repeating part of a timeline."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING

from lightning_pipe.schedules.dependencies import Number

if TYPE_CHECKING:
    from lightning_pipe.simulate.timeline import Event, Timeline

# Measured times never repeat exactly; sums of floats almost do.
_TOLERANCE = {"": 1e-9, "s": 0.2}


def steady_bubble_ratio(timeline: Timeline) -> Number | None:
    """See :attr:`Timeline.steady_bubble_ratio`; ``None`` if nothing repeats."""
    by_micro_batch: dict[int, dict[tuple[object, ...], Event]] = defaultdict(dict)
    for row in timeline.compute:
        for event in row:
            if event.micro_batch is not None:
                by_micro_batch[event.micro_batch][event.rank, event.kind, event.stage, event.pipe] = event
    count = len(by_micro_batch)
    first, last = count // 3, count - count // 3
    for shift in range(1, (last - first) // 2 + 1):
        period = _period(by_micro_batch, range(first, last - shift), shift, _TOLERANCE[timeline.unit])
        if period is not None:
            work = sum(
                event.end - event.start
                for micro_batch in range(first, first + shift)
                for event in by_micro_batch[micro_batch].values()
            )
            whole = timeline.ranks * period
            return ratio(whole - work, whole)
    return None


def _period(
    by_micro_batch: dict[int, dict[tuple[object, ...], Event]], starts: range, shift: int, tolerance: float
) -> Number | None:
    """The time between the actions of micro-batches ``shift`` apart, if it is the same for all of them."""
    gaps: list[Number] = []
    for micro_batch in starts:
        here, there = by_micro_batch[micro_batch], by_micro_batch[micro_batch + shift]
        if here.keys() != there.keys():
            return None
        gaps += [there[key].start - event.start for key, event in here.items()]
    low, high = min(gaps), max(gaps)
    if low <= 0 or high - low > tolerance * low:
        return None
    return low if low == high else sum(gaps) / len(gaps)


def ratio(part: Number, whole: Number) -> Number:
    """``part / whole``, exact if both are."""
    if not whole:
        return 0
    return part / whole if isinstance(part, float) or isinstance(whole, float) else Fraction(part) / whole
