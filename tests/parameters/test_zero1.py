"""Optimizer state divided over replicas and twins: the same weights, a part of the state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.parameters.zero1 import OptimizerShards
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.threads import ThreadTransport, run_threads, thread_world
from lightning_pipe.transport.topology import Topology
from tests.support.engine_runs import assert_close, state_of
from tests.support.small_net import Scaled

pytestmark = pytest.mark.usefixtures("float64")


def train(schedule: str, ranks: int, replicas: int, *, sharded: bool) -> list[tuple[dict[str, Tensor], int, int]]:
    """For each process the weights at the end, and the elements of optimizer state before and after gathering."""
    torch.manual_seed(0)
    net, data = Scaled(), [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(3)]

    def body(transport: ThreadTransport) -> tuple[dict[str, Tensor], int, int]:
        mine = copy.deepcopy(net)
        layers = find_layers(mine, "layers")
        pipeline = Pipeline(mine, layers, [len(layers) // ranks] * ranks, schedules.get(schedule), transport)
        pipeline.partition()
        optimizer, shards = torch.optim.Adam(mine.parameters(), lr=0.01, eps=1e-3), None
        for x, y in data:
            optimizer.zero_grad()
            halves = list(zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True))
            parts = list(zip(*(side.tensor_split(4 // replicas) for side in halves[transport.replica]), strict=True))
            pipeline.train(lambda _, part: mine(*part), parts, [len(part[0]) / 8 for part in parts])
            if sharded:
                shards = shards or OptimizerShards(pipeline.reductions.shared, transport)
                shards.drop_gradients()
            optimizer.step()
            if shards is not None:
                shards.share()
        own = elements(optimizer)
        if shards is not None:
            shards.gather_states([optimizer])
            whole = elements(optimizer)
            shards.drop_states([optimizer])
            assert elements(optimizer) == own
        else:
            whole = own
        pipeline.restore()
        return state_of(mine), own, whole

    loss_rank = schedules.get(schedule).build(ranks, 4).loss_ranks[0]
    return run_threads(thread_world(Topology.for_schedule(ranks, replicas, loss_rank=loss_rank)), body, timeout=30)


def elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas"), [("1f1b", 2, 2), ("chimera", 2, 1), ("chimera", 4, 2), ("gpipe", 1, 4)]
)
def test_sharded_updates_are_the_same(schedule: str, ranks: int, replicas: int) -> None:
    plain = train(schedule, ranks, replicas, sharded=False)
    sharded = train(schedule, ranks, replicas, sharded=True)
    for (values, own, whole), (expected, all_state, _) in zip(sharded, plain, strict=True):
        assert_close(values, expected, 0.0)
        assert whole == all_state
        assert own < all_state
    # Together the processes hold each moment once.
    total = 2 * sum(value.numel() for value in plain[0][0].values())
    assert sum(own for _, own, _ in sharded) == total
