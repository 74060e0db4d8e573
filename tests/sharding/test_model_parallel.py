"""Modules that divide themselves train to the weights that they get under Lightning's ModelParallelStrategy."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from tests.support import oracle
from tests.support.processes import run_trainers
from tests.support.sharded_runs import MODELS, Weights
from tests.support.trainer_runs import quiet

NAMES = ("divides_itself", "divided_gpt2", "divided_llama", "divided_mixtral")
SIZES: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 2}


def fit(process: int, devices: int, strategies: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights of each model with each strategy; without options it is Lightning's."""
    from lightning_pipe import PipeStrategy

    quiet()
    found = []
    for options in strategies:
        for name in NAMES:
            entry, weights = MODELS[name], Weights()
            trace = oracle.fit(
                entry.build(),
                entry.batches(10)[process // 2 % 2 :: 2],
                clip=None,
                strategy=PipeStrategy(**options, **SIZES) if options else ModelParallelStrategy(**SIZES),
                devices=devices,
                use_distributed_sampler=False,
                callbacks=[weights],
            )
            found.append((trace.losses, weights.found))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_steps() -> None:
    common = {"micro_batches": 2, "pipeline_parallel_size": 2, "rank_order": "replicas"}
    schedules = [{"schedule": "1f1b", **common}, {"schedule": "interleaved", "stages": 4, **common}]
    theirs = run_trainers(fit, 4, devices=4, strategies=[{}], timeout=200)
    ours = run_trainers(fit, 8, devices=8, strategies=schedules, timeout=380)
    for number, name in enumerate(NAMES * len(schedules)):
        names: set[str] = set()
        for process, of_process in enumerate(ours):
            losses, weights = of_process[number]
            expected, whole = theirs[process % 4][number % len(NAMES)]
            names |= weights.keys()
            assert len(losses) == 5
            assert weights
            oracle.assert_equal(oracle.Trace(losses=losses), oracle.Trace(losses=expected))
            truth = {each: whole[each] for each in weights}
            oracle.assert_equal(oracle.Trace(weights=weights), oracle.Trace(weights=truth))
        assert names == theirs[0][number % len(NAMES)][1].keys(), name
