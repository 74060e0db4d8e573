"""What torch.distributed.pipelining 2.13 does wrong without saying so, or refuses, works here.

Each test is one failure that was reproduced there on two to four processes. Others are models and sizes of
`tests/engine/test_equality.py`: gradients of several batches, evaluations between them, tied and frozen weights, odd
batches, changing lengths, running statistics, skips, keywords, unused outputs, fewer micro-batches than ranks; and of
`tests/intercept/test_stage_run.py`: uneven micro-batches, and another number of them from batch to batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.pipeline import Pipeline
from tests.support import oracle
from tests.support.equality_sweep import Point, over_threads
from tests.support.model_zoo import ZOO, Entry
from tests.support.pairs import slow_but
from tests.support.zoo.base import WIDTH, Block, Regression

SCHEDULES = slow_but(["gpipe", "1f1b", "interleaved"], "interleaved")


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

    found = over_threads(entry, Point(stages=4), body)[0]
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

    found = over_threads(entry, Point(schedule, stages=4), body)[0]
    module = entry.build()
    for batch, results in zip(batches, found, strict=True):
        expected = module(batch["x"])
        assert oracle.close(torch.cat([results[i] for i in sorted(results)]), expected)


# ------------------------------------------------------------------ what is refused there


def test_prediction_needs_no_target_and_no_loss() -> None:
    """There: an evaluation without target fails on the last rank."""
    entry = ZOO["hidden_states"]
    inputs = [batch["x"] for batch in entry.batches(1)]

    def body(pipeline: Pipeline, module: Any) -> dict[int, Any]:
        with torch.inference_mode():
            results = pipeline.evaluate(lambda _, part: {"prediction": module(part), "of": len(part)}, inputs)
        # inference_mode leaves nothing behind that training meets
        parts = oracle.split(entry.batches(1)[0], 4)
        pipeline.train(lambda _, part: module.training_step(part, 0), parts, oracle.shares(parts))
        return results

    last, *others = over_threads(entry, Point(stages=4), body)  # process 0 has the last stage
    assert others == [{}] * 3
    assert last[0]["of"] == len(inputs[0])
    assert oracle.close(last[0]["prediction"], entry.build()(inputs[0]))
