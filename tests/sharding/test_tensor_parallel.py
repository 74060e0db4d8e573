"""``tensor_parallel_size``: several processes compute each layer, and train as one device does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support import oracle
from tests.support.oracle import Trace
from tests.support.processes import in_turn
from tests.support.sharded_runs import FAMILIES, Pairs, Sharded, check, compare, fit_all
from tests.support.sharded_runs import MODELS as ENTRIES
from tests.support.trainer_runs import quiet

MODELS = [*FAMILIES, "qwen3", "pairs"]
INTERLEAVED = Sharded("interleaved", stages=4, micro_batches=4, tensor=2, parameters=False)
TOGETHER = Sharded("1f1b", ranks=1, micro_batches=2, tensor=2, parameters=False, steps=2)
"""Two stages of two processes, which both have a part of every layer; test_without_memory has stages of their own."""
ON_ONE_RANK = ["rows", "marked"]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """One world for all: what torch finds out about an operation on parts takes longer than the operation."""
    trained = partial(fit_all, names=ON_ONE_RANK, point=TOGETHER)
    return in_turn({"trained": trained, "own values": partial(fit_with_values_of_its_own, tensor=2)}, 2)


@pytest.mark.timeout(120)
def test_tensor_ranks_train_as_one_device(found: dict[str, list[Any]]) -> None:
    """Further below experts, and modules that divide themselves; test_without_memory has Llama by its own plan."""
    compare(found["trained"], ON_ONE_RANK, TOGETHER, "tensor_parallel")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("names", "point"),
    [
        (MODELS, Sharded("1f1b", tensor=2, parameters=False, steps=5)),
        ([*FAMILIES, "divided_llama", "rows"], replace(INTERLEAVED, steps=5)),
    ],
)
def test_further_models(names: list[str], point: Sharded) -> None:
    check(names, point, "tensor_parallel", timeout=220)


class Dropping(Pairs):
    """Forgets some of what is whole on each tensor rank, and some within its layers.

    It has a parameter of its own, and an optimizer that takes all into one operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))
        for layer in self.layers:
            layer.down = nn.Sequential(layer.down, nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5, self.training)
        return self.scale * self.head(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


def divide_dropping(layer: nn.Module, mesh: Any) -> None:
    if hasattr(layer, "up"):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down.0": RowwiseParallel()})


def fit_with_values_of_its_own(process: int, tensor: int) -> dict[str, Tensor]:
    """The weights on so many tensor ranks of a module that each process has built with values of its own."""
    from lightning_pipe import PipeStrategy

    quiet()
    torch.manual_seed(process)
    module = Dropping().double()
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"pipeline_parallel_size": 1, "tensor_parallel_size": tensor, "compare_losses": False}
    own = PipeStrategy(micro_batches=2, **sizes, parallelize=divide_dropping if tensor > 1 else None)
    return oracle.fit(module, ENTRIES["pairs"].batches(2), strategy=own, devices=tensor).weights


@pytest.mark.timeout(120)
def test_tensor_ranks_have_the_values_of_the_first_and_step_and_forget_alike(found: dict[str, list[Any]]) -> None:
    """The masks are those of a pipeline, so the truth is one of one process."""
    truth = Trace(weights=fit_with_values_of_its_own(0, 1))
    for weights in found["own values"]:
        oracle.assert_equal(Trace(weights=weights), truth)


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
