"""The arithmetic of ranks, stages and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pipe.config import (
    BatchEquation,
    RunLayout,
    layout,
    micro_batch_count,
    micro_batch_sizes,
    micro_batch_weights,
)
from lightning_pipe.errors import ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"world_size": 1}, (1, 1, 1)),
        ({"world_size": 4}, (4, 1, 4)),
        ({"world_size": 8, "pipeline_parallel_size": 4}, (4, 2, 4)),
        ({"world_size": 8, "data_parallel_size": 8}, (1, 8, 1)),
        ({"world_size": 8, "pipeline_parallel_size": 2, "data_parallel_size": 4}, (2, 4, 2)),
        ({"world_size": 1, "stages": 4}, (1, 1, 4)),
        ({"world_size": 2, "stages": 8}, (2, 1, 8)),
        ({"world_size": 2, "stages": 3}, (2, 1, 3)),
    ],
)
def test_layout(arguments: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = layout(**arguments)
    assert found == RunLayout(*expected)
    assert found.world_size == arguments["world_size"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"world_size": 8, "pipeline_parallel_size": 3},
            r"8 is not divisible by pipeline_parallel_size=3 \(8 / 3 = 2.67\).*"
            r"Use pipeline_parallel_size=1, 2, 4, 8, or start a multiple of 3 processes",
        ),
        (
            {"world_size": 6, "data_parallel_size": 4},
            r"not divisible by data_parallel_size=4.*Use data_parallel_size=1, 2, 3, 6,",
        ),
        (
            {"world_size": 2, "data_parallel_size": 4},
            r"not divisible by data_parallel_size=4.*Use data_parallel_size=1, 2, or start a multiple of 4",
        ),
        (
            {"world_size": 8, "pipeline_parallel_size": 2, "data_parallel_size": 3},
            r"2 x data_parallel_size=3 = 6 processes, but the world size is 8.*Start 6 processes",
        ),
        ({"world_size": 4, "stages": 2}, r"2 stages cannot occupy 4 ranks.*stages=4 or more, or .*size=2 or less"),
        ({"world_size": 4, "stages": 0}, r"stages=0: a positive whole number"),
        ({"world_size": 4, "pipeline_parallel_size": "all"}, r"pipeline_parallel_size='all'"),
        ({"world_size": 4, "pipeline_parallel_size": True}, r"pipeline_parallel_size=True"),
        ({"world_size": 4, "data_parallel_size": 2.0}, r"data_parallel_size=2.0"),
    ],
)
def test_layout_errors_show_the_arithmetic(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        layout(**arguments)


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [
        (16, 4, 16),
        (64, 4, 16),
        (20, 4, 10),
        (24, 4, 12),
        (1, 4, 1),
        (3, 4, 3),
        (13, 2, 7),
        (17, 4, 9),
        (7, 1, 4),
        (8, 1, 4),
    ],
)
def test_automatic_micro_batches(batch: int, ranks: int, expected: int) -> None:
    assert micro_batch_count(batch, ranks) == expected


@given(st.integers(1, 300), st.integers(1, 16))
def test_automatic_micro_batches_fill_the_pipeline(batch: int, ranks: int) -> None:
    count = micro_batch_count(batch, ranks)
    most = min(4 * ranks, batch)
    assert most / 2 <= count <= most
    sizes = micro_batch_sizes(batch, count)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("batch", "wanted", "count"), [(8, 4, 4), (3, 4, 3), (1, 4, 1), (5, 1, 1)])
def test_micro_batches_by_number(batch: int, wanted: int, count: int) -> None:
    assert micro_batch_count(batch, ranks=2, micro_batches=wanted) == count


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "many", None])
def test_micro_batches_must_be_a_positive_number(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match=f"micro_batches={wrong!r}"):
        micro_batch_count(8, ranks=2, micro_batches=wrong)  # type: ignore[arg-type]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="0 samples"):
        micro_batch_count(0, ranks=2)


@given(st.integers(1, 100), st.integers(1, 100))
def test_sizes_add_up(batch: int, micro_batches: int) -> None:
    sizes = micro_batch_sizes(batch, micro_batches)
    assert sum(sizes) == batch
    assert len(sizes) == micro_batches
    assert sizes == sorted(sizes, reverse=True)


def test_weights_sum_to_one_over_all_pipelines() -> None:
    one, two = [3, 3, 2], [2, 2]
    weights = micro_batch_weights(one, total=12) + micro_batch_weights(two, total=12)
    assert sum(weights) == pytest.approx(1)
    assert micro_batch_weights([1, 3]) == [0.25, 0.75]


@pytest.mark.parametrize("amounts", [[0, 0], [2, -1], []])
def test_weights_must_be_positive_in_total(amounts: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="loss_weight"):
        micro_batch_weights(amounts)


def test_batch_equation() -> None:
    equation = BatchEquation(batch=10, micro_batches=4, data_parallel_size=2, accumulation=3)
    assert equation.global_batch == 60
    assert equation.sizes == [3, 3, 2, 2]
    assert str(equation) == (
        "60 samples per optimizer step = 10 (batch) x 2 (replicas) x 3 (accumulation); batch = 4 micro-batches x 2 to 3"
    )


@pytest.mark.parametrize(("batch", "sizes"), [(5, [3, 2]), (3, [3]), (1, [1]), (8, [2] * 4)])
def test_every_micro_batch_has_what_it_needs(batch: int, sizes: list[int]) -> None:
    assert micro_batch_sizes(batch, micro_batch_count(batch, ranks=1, micro_batches=4, least=2)) == sizes
    assert min(micro_batch_sizes(batch, micro_batch_count(batch, ranks=1, least=2))) >= min(batch, 2)
