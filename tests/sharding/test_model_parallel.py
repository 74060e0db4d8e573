"""A module that divides itself trains to the weights that it gets under Lightning's ModelParallelStrategy."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.local_parts import whole
from tests.support import oracle
from tests.support.processes import run_trainers
from tests.support.sharded_runs import MODELS
from tests.support.trainer_runs import quiet


class Weights(L.Callback):
    """Puts together the parameters that this process has a part of."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        held = {name: p for name, p in pl_module.named_parameters() if not is_absent(p)}
        self.found = {name: whole(p.detach()) for name, p in held.items()}


def fit(process: int, pipeline: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights; ``pipeline=0``: under Lightning's strategy."""
    from lightning_pipe import PipeStrategy

    quiet()
    sizes: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    own = PipeStrategy("interleaved", 2, pipeline, stages=4, rank_order="replicas", **sizes) if pipeline else None
    entry, weights = MODELS["divides_itself"], Weights()
    replica = process // 2 % 2
    trace = oracle.fit(
        entry.build(),
        entry.batches(10)[replica::2],
        clip=None,
        strategy=own or ModelParallelStrategy(**sizes),
        devices=4 * max(1, pipeline),
        use_distributed_sampler=False,
        callbacks=[weights],
    )
    return trace.losses, weights.found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_five_steps() -> None:
    theirs = run_trainers(fit, 4, pipeline=0, timeout=90)
    ours = run_trainers(fit, 8, pipeline=2, timeout=100)
    for process, (losses, weights) in enumerate(ours):
        expected = theirs[process % 4]
        assert len(losses) == 5
        assert weights
        oracle.assert_equal(oracle.Trace(losses=losses), oracle.Trace(losses=expected[0]))
        truth = {name: expected[1][name] for name in weights}
        oracle.assert_equal(oracle.Trace(weights=weights), oracle.Trace(weights=truth))
    assert {name for _, weights in ours for name in weights} == theirs[0][1].keys()
