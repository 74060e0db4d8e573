"""Optimizer state divided over replicas and twins: the same weights, a part of the state."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.config import Sharding
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.parameters import zero
from lightning_pipe.parameters.zero import HolderGroup, OptimizerShards
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.topology import Topology
from tests.support.engine_runs import assert_close, state_of
from tests.support.pairs import pairs
from tests.support.small_net import Scaled
from tests.support.threads import ThreadTransport, run_threads, thread_world

pytestmark = pytest.mark.usefixtures("float64")


def train(schedule: str, ranks: int, replicas: int, sharded: Sharding) -> list[tuple[dict[str, Tensor], int, int]]:
    """For each process the weights at the end, and the elements of optimizer state before and after gathering."""
    torch.manual_seed(0)
    net, data = Scaled(), [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(3)]

    def body(transport: ThreadTransport) -> tuple[dict[str, Tensor], int, int]:
        mine = copy.deepcopy(net)
        layers = find_layers(mine, "layers")
        pipeline = Pipeline(mine, layers, [len(layers) // ranks] * ranks, schedules.get(schedule), transport)
        pipeline.partition()
        pipeline.reductions.scattered = sharded == "gradients"
        optimizer, shards = torch.optim.Adam(mine.parameters(), lr=0.01, eps=1e-3), None
        for x, y in data:
            optimizer.zero_grad()
            halves = list(zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True))
            parts = list(zip(*(side.tensor_split(4 // replicas) for side in halves[transport.replica]), strict=True))
            pipeline.train(lambda _, part: mine(*part), parts, [len(part[0]) / 8 for part in parts])
            if sharded:
                shards = pipeline.reductions.shards
                assert shards is not None
                if sharded != "gradients":
                    shards.drop_gradients()
                # what is shared has its gradient on one process, whichever way
                assert all((p.grad is not None) == shards.mine(p) for _, p in pipeline.local_parameters())
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
    return run_threads(thread_world(Topology(ranks, replicas, loss_rank=loss_rank)), body, timeout=30)


def elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas", "sharding"),
    pairs(
        [("1f1b", 2, 2), ("chimera", 2, 1), ("chimera", 4, 2), ("gpipe", 1, 4)],
        [True, "gradients"],
        lambda run, sharding: run == sharding,
    ),
)
def test_sharded_updates_are_the_same(schedule: str, ranks: int, replicas: int, sharding: Sharding) -> None:
    plain = train(schedule, ranks, replicas, False)
    sharded = train(schedule, ranks, replicas, sharding)
    for (values, own, whole), (expected, all_state, _) in zip(sharded, plain, strict=True):
        assert_close(values, expected, 0.0)
        assert whole == all_state
        assert own < all_state
    # Together the processes hold each moment once.
    total = 2 * sum(value.numel() for value in plain[0][0].values())
    assert sum(own for _, own, _ in sharded) == total


def test_what_is_trained_is_divided_evenly_beside_large_frozen_parameters() -> None:
    """As with adapters: frozen weights have neither gradients nor state."""
    transport = thread_world(Topology(1, 2))[0]
    frozen = [nn.Parameter(torch.zeros(size), requires_grad=False) for size in (1000, 400)]
    trained = [nn.Parameter(torch.zeros(10)) for _ in range(8)]
    shards = OptimizerShards([HolderGroup((0, 1), (*frozen, *trained))], transport)
    assert sum(map(shards.mine, trained)) == 4
    assert [shards.owner(parameter) for parameter in frozen] in ([0, 1], [1, 0])


def test_values_are_shared_with_a_few_buckets_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "buckets", partial(zero.buckets, bucket_bytes=1))
    monkeypatch.setattr(zero, "_UNDER_WAY", 2)

    def body(transport: ThreadTransport) -> list[float]:
        group = HolderGroup((0, 1), tuple(nn.Parameter(torch.zeros(2)) for _ in range(9)))
        shards = OptimizerShards([group], transport)
        for number, parameter in enumerate(group.parameters):
            if shards.mine(parameter):
                parameter.data.fill_(number)
        shards.share()
        return [float(parameter[1]) for parameter in group.parameters]

    assert run_threads(thread_world(Topology(1, 2)), body) == [[*map(float, range(9))]] * 2
