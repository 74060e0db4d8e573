"""``tensor_parallel_size``: several processes compute each layer, and train as one device does."""

from __future__ import annotations

import pytest

from tests.support.sharded_runs import FAMILIES, Sharded, check

MODELS = [*FAMILIES, "qwen3", "pairs"]


@pytest.mark.timeout(120)
def test_tensor_ranks_train_as_one_device() -> None:
    check(MODELS, Sharded("1f1b", tensor=2, parameters=False, steps=5), "tensor_parallel")


@pytest.mark.timeout(120)
def test_interleaved() -> None:
    point = Sharded("interleaved", stages=4, micro_batches=4, tensor=2, parameters=False, steps=5)
    check([*FAMILIES, "divided_llama", "rows"], point, "tensor_parallel")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "point",
    [
        Sharded("1f1b", replicas=2, tensor=2, rank_order="replicas", steps=5),
        Sharded("interleaved", stages=4, replicas=2, tensor=2, steps=5),
    ],
    ids=str,
)
def test_three_dimensions(point: Sharded) -> None:
    check(MODELS, point, "data_parallelxtensor_parallel", timeout=280)
