"""``tensor_parallel_size``: several processes compute each layer, and train as one device does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support import oracle
from tests.support.oracle import Trace
from tests.support.processes import run_trainers
from tests.support.sharded_runs import FAMILIES, Pairs, Sharded, check, divide_pair
from tests.support.sharded_runs import MODELS as ENTRIES
from tests.support.trainer_runs import quiet

MODELS = [*FAMILIES, "qwen3", "pairs"]
INTERLEAVED = Sharded("interleaved", stages=4, micro_batches=4, tensor=2, parameters=False)
TOGETHER = Sharded("1f1b", ranks=1, micro_batches=2, tensor=2, parameters=False, steps=2)
"""Two stages of two processes, which both have a part of every layer; test_without_memory has stages of their own."""


@pytest.mark.timeout(120)
def test_tensor_ranks_train_as_one_device() -> None:
    """Further below experts, and modules that divide themselves; test_without_memory has Llama by its own plan."""
    check(["rows"], TOGETHER, "tensor_parallel")


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


class Fused(Pairs):
    """Has a parameter of its own, and an optimizer that takes all into one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


class Dropped(Pairs):
    """Forgets some of what is whole on each tensor rank."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5, self.training)
        return self.head(x)


class Dropping(Dropped):
    """... and some within its layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.down = nn.Sequential(layer.down, nn.Dropout(0.5))


def divide_dropping(layer: nn.Module, mesh: Any) -> None:
    if hasattr(layer, "up"):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down.0": RowwiseParallel()})


def fit_with_values_of_its_own(process: int, tensor: int) -> list[dict[str, Tensor]]:
    """The weights on so many tensor ranks of modules that each process has built with values of its own."""
    from lightning_pipe import PipeStrategy

    quiet()
    found = []
    for make, divide in ((Fused, divide_pair), (Dropping, divide_dropping)):
        torch.manual_seed(process)
        module = make().double()
        torch.manual_seed(1)
        sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": tensor}
        own: Any = PipeStrategy(micro_batches=2, **sizes, parallelize=divide if tensor > 1 else None)
        if tensor == 1 and make is Fused:  # one device itself; masks are those of a pipeline
            own = "auto"
        found.append(oracle.fit(module, ENTRIES["pairs"].batches(2), strategy=own, devices=tensor).weights)
    return found


@pytest.mark.timeout(60)
def test_tensor_ranks_have_the_values_of_the_first_and_step_and_forget_alike() -> None:
    truths = fit_with_values_of_its_own(0, 1)
    for of_process in run_trainers(fit_with_values_of_its_own, 2, tensor=2, timeout=50):
        for weights, truth in zip(of_process, truths, strict=True):
            oracle.assert_equal(Trace(weights=weights), Trace(weights=truth))


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
