"""A sequence of costs is divided so that the largest stage is as small as brute force finds it."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pipe.errors import PartitionError
from lightning_pipe.partition import balance


def brute_force(costs: list[int], stages: int) -> list[int]:
    """Every division: smallest largest stage, then smallest sum of squares, then the lighter stages first."""

    def rank(inner: tuple[int, ...]) -> tuple[int, int, list[int]]:
        ends = [0, *inner, len(costs)]
        sums = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return max(sums), sum(s * s for s in sums), ends[::-1]

    best = min(combinations(range(1, len(costs)), stages - 1), key=rank)
    return [b - a for a, b in pairwise([0, *best, len(costs)])]


@given(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 50]), min_size=1, max_size=9), st.data())
def test_equals_brute_force(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    assert balance(costs, stages) == brute_force(costs, stages)


@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=8), st.data())
def test_floats_are_exact(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    scaled = [int(cost * 2**1074) if cost else 0 for cost in map(Fraction, costs)]
    assert balance(costs, stages) == brute_force(scaled, stages)


def test_a_float_division_that_rounding_would_decide() -> None:
    # as floats 0.1 + 0.2 > 0.3; as the rational numbers these floats are, it is too, by 2**-55
    assert balance([0.3, 0.1, 0.2], 2) == [1, 2]
    assert balance([0.1, 0.2, 0.3], 2) == [2, 1]


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1] * 10, 4, [2, 2, 3, 3]),
        ([1, 1, 1, 1, 4], 2, [4, 1]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([5], 1, [1]),
        ([100, 0, 0, 0], 3, [1, 1, 2]),
    ],
)
def test_known_divisions(costs: list[int], stages: int, expected: list[int]) -> None:
    assert balance(costs, stages) == expected


@pytest.mark.parametrize(
    "costs",
    [[1] * 1000, [1] * 500 + [1000] + [1] * 499, [(i * 7919) % 1013 / 7 for i in range(1000)], [0] * 1000],
    ids=["equal", "one dominates", "mixed", "zero"],
)
def test_a_thousand_layers_on_64_stages_take_no_time(costs: list[float]) -> None:
    start = perf_counter()
    division = balance(costs, 64)
    assert perf_counter() - start < 2
    assert sum(division) == 1000
    assert min(division) >= 1


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(PartitionError, match=r"3 layers cannot fill 4 stages(?s:.*)at most 3 stages"):
        balance([1, 2, 3], 4)
    with pytest.raises(PartitionError, match="stages=0"):
        balance([1], 0)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_costs_must_be_finite_and_positive(wrong: float) -> None:
    with pytest.raises(PartitionError, match="cost of layer 1 is"):
        balance([1, wrong], 1)
