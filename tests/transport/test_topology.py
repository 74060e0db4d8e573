"""Processes, ranks and replicas map onto each other without gaps."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from lightning_pipe.config import RankOrder
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.transport.topology import Topology


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("rank_order", ["pipeline", "replicas"])
def test_locate_undoes_process(ranks: int, replicas: int, rank_order: RankOrder) -> None:
    for loss_rank in range(ranks):
        topology = Topology(ranks, replicas, loss_rank, rank_order)
        places = [topology.locate(process) for process in range(topology.world_size)]
        assert sorted(places) == [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
        assert [topology.process(*place) for place in places] == list(range(topology.world_size))
        step = ranks if rank_order == "pipeline" else 1
        assert [topology.locate(replica * step) for replica in range(replicas)] == [
            (replica, loss_rank) for replica in range(replicas)
        ]


def test_linear_schedules_are_reversed() -> None:
    topology = Topology(4, 2, loss_rank=-1)
    assert topology.order == (3, 2, 1, 0)
    assert topology.pipeline_processes(1) == (7, 6, 5, 4)
    assert topology.replica_processes(0) == (3, 7)
    assert topology.members(1, [0, 3]) == (4, 7)


def test_nodes_hold_pipelines_or_replicas() -> None:
    pipelines, replicas = (Topology(4, 2, loss_rank=-1, rank_order=order, node_size=4) for order in get_args(RankOrder))
    assert pipelines.nodes == replicas.nodes == (range(4), range(4, 8))
    assert [{pipelines.locate(process)[0] for process in node} for node in pipelines.nodes] == [{0}, {1}]
    assert [{replicas.locate(process)[1] for process in node} for node in replicas.nodes] == [{3, 2}, {1, 0}]
    assert Topology(2, 2).nodes == (range(4),)


@pytest.mark.parametrize("loss_rank", range(4))
def test_neighbours_stay_neighbours(loss_rank: int) -> None:
    order = Topology(4, 1, loss_rank).order
    assert all((b - a) % 4 in (1, 3) for a, b in itertools.pairwise(order))


def test_names_for_messages() -> None:
    assert Topology(2).describe(1) == "rank 1"
    assert Topology(2, loss_rank=-1).describe(0) == "rank 0"
    assert Topology(2, 2, loss_rank=-1).describe(2) == "rank 2 (replica 1)"


def test_what_does_not_fit_raises() -> None:
    with pytest.raises(ConfigurationError, match=r'"pipeline" (.|\n)* or "replicas"'):
        Topology(2, rank_order="nodes")  # type: ignore[arg-type]
