"""What crosses from node to node: counted by hand for small topologies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe import plan
from lightning_pipe.config import RankOrder
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.cost_profile import CostProfile, LayerSizes, SizeCosts
from lightning_pipe.planning.traffic import messages_of, node_traffic, ring_bytes, topology_facts
from lightning_pipe.schedules import get
from lightning_pipe.transport.topology import Topology


def test_messages_are_those_of_the_lowered_schedule() -> None:
    from lightning_pipe.schedules.passes.lower import lower

    for name, ranks in (("1f1b", 4), ("interleaved", 2), ("chimera", 4), ("zero_bubble", 3), ("dualpipev", 2)):
        schedule = get(name).build(ranks, 8)
        sent: dict[tuple[int, int], int] = {}
        for rank, actions in enumerate(lower(schedule)):
            for action in actions:
                if action.kind.startswith("SEND"):
                    assert action.peer is not None
                    sent[rank, action.peer] = sent.get((rank, action.peer), 0) + 1
        assert dict(messages_of(schedule, 1)) == sent, name


def test_a_ring_crosses_as_often_as_neighbours_are_on_different_nodes() -> None:
    for order, hops in (("pipeline", 2), ("replicas", 0)):
        topology = Topology(2, 2, rank_order=order, node_size=2)  # type: ignore[arg-type]
        assert ring_bytes(topology, (0,), 100) == hops * 100  # 2 (n - 1) / n is 1 for two members
    everywhere = Topology(2, 4, rank_order="replicas", node_size=2)  # ranks: nodes 0, 1 and 2, 3
    assert [everywhere.node(member) for member in everywhere.holders((0,))] == [0, 0, 1, 1]
    assert ring_bytes(everywhere, (0,), 100) == 2 * 1.5 * 100
    # tied over both ranks: a ring over all eight, which leaves each of four nodes once
    assert ring_bytes(everywhere, (0, 1), 100) == 4 * 1.75 * 100
    assert ring_bytes(Topology(4), (0,), 100) == 0


def made(nodes: int, rank_order: RankOrder = "pipeline") -> object:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    costs = SizeCosts((1e-3,) * 2, (2e-3,) * 2, (1e-3,) * 2, (0.0,) * 2, (1024.0,) * 2)
    profile = CostProfile("Sequential", tuple(LayerSizes(str(i), 64, 256) for i in range(2)), {4: costs})
    options = {"replicas": 2, "nodes": nodes, "rank_order": rank_order, "profile": profile}
    return plan(module, ranks=2, batch=16, micro_batches=4, accumulation=3, **options)  # type: ignore[arg-type]


def test_the_plan_compares_both_orders() -> None:
    lines = " ".join(str(made(2)).split())
    assert "Nodes node 0 has ranks 0, 1; node 1 has ranks 2, 3" in lines
    # two stages of 256 bytes, each over two replicas on two nodes: 2 x 2 x 256
    mine = 'rank_order="pipeline": 0 messages between stages of 0 B together, 1 KiB to sum gradients'
    # 3 batches x 2 replicas x 4 micro-batches, there and back, of 1 KiB
    other = 'rank_order="replicas": 48 messages between stages of 48 KiB together, 0 B to sum gradients'
    less = 'rank_order="pipeline" sends less: 1 KiB, not 48 KiB'
    why = "the ranks of a pipeline are neighbours, for what stages send each other"
    assert f"Between in a step: {mine} instead of {other} {why}; {less}" in lines
    lines = " ".join(str(made(2, "replicas")).split())
    assert f"in a step: {other} instead of {mine}" in lines
    assert f"the holders of a stage are neighbours, for the sums of its gradients; {less}" in lines


def test_on_one_node_there_is_nothing_to_say() -> None:
    assert "node" not in str(made(1))


def test_processes_must_divide_over_nodes() -> None:
    with pytest.raises(ConfigurationError, match="4 processes cannot be divided over 3 nodes"):
        made(3)


def test_many_nodes_are_shortened() -> None:
    facts = dict(topology_facts(Topology(64, 2, node_size=8), node_traffic(Topology(64, 2, node_size=8), {}, {})))
    assert facts["Nodes"] == "node 0 has ranks 0 to 7; node 1 has ranks 8 to 15; …; node 15 has ranks 120 to 127"
