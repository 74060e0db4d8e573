"""What torch.distributed.pipelining 2.13 does wrong without saying so, or refuses, works here.

Each test is one failure that was reproduced there on two to four processes. Others are models and sizes of
`tests/engine/test_equality.py`: gradients of several batches, evaluations between them, tied and frozen weights, odd
batches, changing lengths, running statistics, skips, keywords, unused outputs, fewer micro-batches than ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.transport.topology import Topology
from tests.support import oracle
from tests.support.equality_sweep import Point, check
from tests.support.model_zoo import ZOO, Entry
from tests.support.pairs import slow_but
from tests.support.threads import run_threads, thread_world
from tests.support.zoo.base import WIDTH, Block, Regression, Residual
from tests.support.zoo.batches import regression_batches

SCHEDULES = slow_but(["gpipe", "1f1b", "interleaved"], "interleaved")


def over_threads(
    entry: Entry, body: Callable[[Pipeline, Any], Any], schedule: str = "1f1b", stages: int = 4
) -> list[Any]:
    """Runs ``body(pipeline, module)`` on every rank; results in the order of the pipeline's ranks."""
    family = schedules.get(schedule)
    topology = Topology(stages // family.stages_per_rank, loss_rank=-1)
    world = thread_world(topology, timeout=timedelta(seconds=20))
    modules = [entry.build() for _ in world]

    def run(transport: Any) -> Any:
        module = modules[transport.process]
        layers = find_layers(module, entry.layers)
        pipeline = Pipeline(module, layers, divide(module, layers, stages), family, transport)
        pipeline.partition()
        return body(pipeline, module)

    results = run_threads(world, run, timeout=60)
    return [results[process] for process in topology.pipeline_processes(0)]


def train_once(pipeline: Pipeline, module: Any, batch: Any, micro_batches: int, seed: int = 0) -> dict[int, Any]:
    parts = oracle.split(batch, micro_batches)
    return pipeline.train(lambda _, part: module.training_step(part, 0), parts, oracle.shares(parts), seed=seed)


# ------------------------------------------------------------------ wrong numbers without a word


class Dropping(Regression):
    """Dropout and batch norm in the layers, dropout outside."""

    def __init__(self) -> None:
        super().__init__([nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_evaluation_mode_is_what_it_says() -> None:
    """There: dropout stays on and batch norm goes on counting in a traced model."""
    entry = Entry("dropping", Dropping, layers="layers")
    batch = entry.batches(1)[0]

    def body(pipeline: Pipeline, module: Any) -> dict[int, Tensor]:
        module.eval()
        parts = oracle.split(batch, 3)
        with torch.no_grad():
            results = [pipeline.evaluate(lambda _, part: module(part["x"]), parts, seed=seed) for seed in (1, 2)]
        assert all(torch.equal(results[0][i], results[1][i]) for i in results[0])
        counts = {v.item() for n, v in module.named_buffers() if n.endswith("tracked") and pipeline.holds(n)}
        assert counts <= {0}
        return results[0]

    found = over_threads(entry, body)[-1]
    module = entry.build().eval()
    assert oracle.close(torch.cat([found[i] for i in range(3)]), module(batch["x"]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_short_forward_only_batch_has_no_stale_rows(schedule: str) -> None:
    """There: sixteen rows come back for a batch of eight, half of them from the batch before."""
    entry = ZOO["residual"]
    whole = entry.batches(2)
    batches = [whole[0], oracle.split(whole[1], 2)[0], oracle.split(whole[1], 8)[0]]

    def body(pipeline: Pipeline, module: Any) -> list[dict[int, Tensor]]:
        with torch.no_grad():
            return [pipeline.evaluate(lambda _, part: module(part["x"]), oracle.split(batch, 4)) for batch in batches]

    found = over_threads(entry, body, schedule)[-1]
    module = entry.build()
    for batch, results in zip(batches, found, strict=True):
        expected = module(batch["x"])
        assert oracle.close(torch.cat([results[i] for i in sorted(results)]), expected)


# ------------------------------------------------------------------ what is refused there


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uneven_micro_batches_and_batches_smaller_than_their_number(schedule: str) -> None:
    """There: all micro-batches have the first one's shape."""
    entry = Entry("uneven", Residual, lambda number: regression_batches(number, (10, 7, 3, 1)), layers="layers")
    check(entry, Point(schedule, stages=4, micro_batches=4, steps=4))


def test_two_numbers_of_micro_batches_in_turn() -> None:
    """There: two schedules on one stage corrupt each other's buffers."""
    entry = ZOO["mlp"]
    batches = entry.batches(4)

    def body(pipeline: Pipeline, module: Any) -> dict[str, Tensor]:
        for index, batch in enumerate(batches):
            train_once(pipeline, module, batch, (4, 2)[index % 2])
        return {name: p.grad for name, p in pipeline.local_parameters() if p.grad is not None}

    found = {name: grad for held in over_threads(entry, body) for name, grad in held.items()}
    module = entry.build()
    for batch in batches:
        module.loss(batch).backward()
    assert found.keys() == {name for name, _ in module.named_parameters()}
    assert all(oracle.close(found[name], p.grad) for name, p in module.named_parameters() if p.grad is not None)


def test_prediction_needs_no_target_and_no_loss() -> None:
    """There: an evaluation without target fails on the last rank."""
    entry = ZOO["hidden_states"]
    inputs = [batch["x"] for batch in entry.batches(1)]

    def body(pipeline: Pipeline, module: Any) -> dict[int, Any]:
        with torch.inference_mode():
            results = pipeline.evaluate(lambda _, part: {"prediction": module(part), "of": len(part)}, inputs)
        train_once(pipeline, module, entry.batches(1)[0], 4)  # inference_mode leaves nothing behind that training meets
        return results

    (*others, last) = over_threads(entry, body)
    assert others == [{}] * 3
    assert last[0]["of"] == len(inputs[0])
    assert oracle.close(last[0]["prediction"], entry.build()(inputs[0]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_come_back_by_micro_batch_and_without_their_graph(schedule: str) -> None:
    """There: losses keep the graph of the whole step alive, and an order of one's own mixes them up."""
    entry = ZOO["mlp"]
    batch = entry.batches(1)[0]

    def body(pipeline: Pipeline, module: Any) -> dict[int, Tensor]:
        return train_once(pipeline, module, batch, 4)

    losses = over_threads(entry, body, schedule)[-1]
    assert sorted(losses) == [0, 1, 2, 3]
    assert not any(loss.requires_grad for loss in losses.values())
    module = entry.build()
    assert all(oracle.close(losses[i], module.loss(part)) for i, part in enumerate(oracle.split(batch, 4)))
