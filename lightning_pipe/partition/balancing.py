"""Divides a sequence of costs over stages so that the largest stage is as small as possible."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

from lightning_pipe.errors import PartitionError
from lightning_pipe.text import several


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Divides layers over stages, in order and at least one layer each, so that the largest stage is smallest.

    Of several such divisions the most even one is taken (smallest sum of squared stage costs), and of several of these
    the one with the lighter stages first, because the first stages hold most activations. The result is exact: floats
    are compared as the rational numbers they are.

    Args:
        costs: cost of every layer, finite and not negative, in any unit.
        stages: number of stages, at most one per layer.

    Returns:
        Number of layers of every stage.

    Raises:
        PartitionError: there are fewer layers than stages, or a cost is negative or not finite.

    Example:
        >>> balance([1, 1, 1, 1, 4], 2)
        [4, 1]
        >>> balance([1, 1, 1, 1, 1], 2)
        [2, 3]
    """
    if stages < 1:
        raise PartitionError(f"stages={stages}: at least 1 stage is needed.")
    if len(costs) < stages:
        raise PartitionError(
            f"{several(len(costs), 'layer')} cannot fill {several(stages, 'stage')}.",
            hint=f"Use at most {several(len(costs), 'stage')}.",
        )
    sums = [0, *accumulate(_integers(costs))]
    return _most_even(sums, stages, _smallest_largest(sums, stages))


def _integers(costs: Sequence[float]) -> list[int]:
    """The costs times their common denominator: sums and comparisons of integers are exact."""
    for index, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise PartitionError(f"The cost of layer {index} is {cost}.", hint="Costs are finite and not negative.")
    exact = [Fraction(cost if isinstance(cost, int) else float(cost)) for cost in costs]
    scale = lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def _smallest_largest(sums: list[int], stages: int) -> int:
    """Bisects for the smallest limit under which the stages suffice (one layer more per stage never hurts)."""
    low, high = max(b - a for a, b in pairwise(sums)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _reach(sums, stages, middle)[-1] == len(sums) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def _reach(sums: list[int], stages: int, limit: int) -> list[int]:
    """How many layers the first 0, 1, … stages can take at most if none exceeds the limit."""
    ends = [0]
    for _ in range(stages):
        ends.append(bisect_right(sums, sums[ends[-1]] + limit) - 1)
    return ends


def _need(sums: list[int], stages: int, limit: int) -> list[int]:
    """How many layers the first 0, 1, … stages must take at least for the rest to fit into the others."""
    ends = [len(sums) - 1]
    for _ in range(stages):
        ends.append(bisect_left(sums, sums[ends[-1]] - limit))
    return ends[::-1]


def _most_even(sums: list[int], stages: int, limit: int) -> list[int]:
    """Smallest sum of squares under the limit.

    Squares of interval sums obey the quadrangle inequality, with intervals over the limit as infinite too. So the best
    start of the last stage moves only to the right with its end, and each stage costs O(n log n) instead of O(n²).
    """
    layers = len(sums) - 1
    reach = _reach(sums, stages, limit)
    # a stage may not take layers that the stages after it need, one each
    needs = _need(sums, stages, limit)
    best: dict[int, int] = {0: 0}
    starts: list[dict[int, int]] = []
    for stage in range(1, stages + 1):
        last = min(reach[stage], layers - (stages - stage))
        best, chosen = _extend(sums, best, limit, max(stage, needs[stage]), last)
        starts.append(chosen)
    boundaries = [layers]
    for chosen in reversed(starts):
        boundaries.append(chosen[boundaries[-1]])
    boundaries.reverse()
    return [b - a for a, b in pairwise(boundaries)]


def _extend(
    sums: list[int], best: dict[int, int], limit: int, first: int, last: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Adds a stage that ends after ``first`` … ``last`` layers: the sums of squares, and where that stage starts."""
    extended: dict[int, int] = {}
    chosen: dict[int, int] = {}
    lowest, highest = min(best), max(best)
    open_ranges = [(first, last, lowest, highest)]
    while open_ranges:
        left, right, from_start, to_start = open_ranges.pop()
        if left > right:
            continue
        end = (left + right) // 2
        starts = range(max(from_start, bisect_left(sums, sums[end] - limit)), min(to_start, end - 1) + 1)
        # the first of equal ones: light stages come first
        start = min(starts, key=lambda start, end=end: best[start] + (sums[end] - sums[start]) ** 2)  # type: ignore[misc]
        extended[end] = best[start] + (sums[end] - sums[start]) ** 2
        chosen[end] = start
        open_ranges += [(left, end - 1, from_start, start), (end + 1, right, start, to_start)]
    return extended, chosen
