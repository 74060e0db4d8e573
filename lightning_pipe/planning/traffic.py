"""What a step sends from node to node, in each order of the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from lightning_pipe.config import RankOrder
from lightning_pipe.planning.memory import Held
from lightning_pipe.schedules import Schedule
from lightning_pipe.schedules.action import Kind
from lightning_pipe.text import memory, several
from lightning_pipe.transport.topology import Topology

Edges = Mapping[tuple[int, int], float]
"""``(rank, peer)`` of one pipeline -> messages or bytes in a step."""


@dataclass(frozen=True)
class NodeTraffic:
    """What crosses from node to node in an optimizer step.

    Args:
        rank_order: the order of the ranks.
        messages: activations and gradients between stages.
        sums: bytes for the sums of gradients over all that hold them.
        boundaries: bytes of the messages; ``None``: not known yet.
        shared: whether ``sums`` counts the values as well that holders update for each other.
    """

    rank_order: RankOrder
    messages: float
    sums: float
    boundaries: float | None = None
    shared: bool = False

    def __str__(self) -> str:
        size = "" if self.boundaries is None else f" of {memory(self.boundaries)} together"
        messages = f"{several(round(self.messages), 'message')} between stages{size}"
        what = "sum gradients and share updates" if self.shared else "sum gradients"
        return f'rank_order="{self.rank_order}": {messages}, {memory(self.sums)} to {what}'


def node_traffic(
    topology: Topology,
    messages: Edges,
    sums: Mapping[tuple[int, ...], float],
    boundaries: Edges | None = None,
    shared: bool = False,
) -> tuple[NodeTraffic, ...]:
    """The traffic of this topology, and then that of the other order of its ranks.

    Args:
        topology: which process is which rank, and on which node.
        messages: of one pipeline in a step.
        sums: for the pipeline ranks that hold some parameters the bytes of their gradients.
        boundaries: bytes of the messages, if they are known.
        shared: whether ``sums`` counts updated values as well.

    Example:
        >>> topology = Topology(ranks=2, replicas=2, node_size=2)
        >>> for each in node_traffic(topology, {(0, 1): 4, (1, 0): 4}, {(0,): 2**20, (1,): 2**20}):
        ...     print(each)
        rank_order="pipeline": 0 messages between stages, 4 MiB to sum gradients
        rank_order="replicas": 16 messages between stages, 0 B to sum gradients
    """
    orders: Iterable[RankOrder] = sorted(get_args(RankOrder), key=lambda order: order != topology.rank_order)
    return tuple(
        NodeTraffic(
            place.rank_order,
            _between_nodes(place, messages),
            sum(ring_bytes(each, owners, size) for each in place.tensor_slices for owners, size in sums.items()),
            None if boundaries is None else _between_nodes(place, boundaries),
            shared,
        )
        for place in (replace(topology, rank_order=order) for order in orders)
    )


def measured(traffic: Sequence[NodeTraffic], topology: Topology, boundaries: Edges) -> tuple[NodeTraffic, ...]:
    """Predicted traffic with the bytes of messages that were counted.

    Args:
        traffic: as predicted.
        topology: which process is which rank, and on which node.
        boundaries: bytes of the messages.
    """
    places = [replace(topology, rank_order=each.rank_order) for each in traffic]
    found = [_between_nodes(place, boundaries) for place in places]
    return tuple(replace(each, boundaries=size) for each, size in zip(traffic, found, strict=True))


def ring_bytes(topology: Topology, owners: Sequence[int], size: float) -> float:
    """What an all-reduce over all holders sends from node to node.

    In a ring of n, in the order of their numbers, each sends ``2 (n - 1) / n`` of the tensor to the next one: Patarasuk
    and Yuan, Bandwidth optimal all-reduce algorithms, section 3. Gloo and NCCL work like this on large tensors.

    Args:
        topology: the processes.
        owners: the pipeline ranks that hold the tensor.
        size: its bytes.
    """
    members = topology.holders(owners)
    hops = sum(topology.node(a) != topology.node(b) for a, b in zip(members, members[1:] + members[:1], strict=True))
    return hops * 2 * (len(members) - 1) / len(members) * size


def messages_of(schedule: Schedule, batches: int, sizes: Sequence[float] | None = None) -> Edges:
    """Messages of batches between the ranks of a pipeline: of every micro-batch at every cut one each way.

    Args:
        schedule: the compute order of one.
        batches: how many.
        sizes: for every stage the bytes of what it hands to the next: then bytes instead of messages.
    """
    found: dict[tuple[int, int], float] = defaultdict(float)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind is Kind.FORWARD and action.stage + 1 < schedule.stages:
                peer = schedule.placement[action.pipe, action.stage + 1]
                if peer != rank:
                    amount = batches * (1 if sizes is None else sizes[action.stage])
                    found[rank, peer] += amount
                    found[peer, rank] += amount
    return found


def step_sums(held: Held, sent_bytes: int | None = None) -> dict[tuple[int, ...], float]:
    """For the ranks that hold some parameters, as bytes of an all-reduce: to sum gradients and share updates of a step.

    An all-reduce is a sum for the owners and then a copy to all, each half of it: where sums go to their owners alone
    the first half is sent for every batch, and the second for the updated values, which `shard_optimizer` sends anyway:
    once for a step, or before every batch where the values are divided.

    Args:
        held: the parameters.
        sent_bytes: bytes of a number in sums; ``None``: as in each parameter.
    """
    found: dict[tuple[int, ...], float] = defaultdict(float)
    sent = replace(held.division, number_bytes=sent_bytes)
    for one in {one.name: one for own in held.stages for one in own if one.parameter.requires_grad}.values():
        sharding = held.division.of(one)
        share = held.accumulation / 2 if sharding in ("gradients", "parameters") else 1.0
        shared = held.accumulation if sharding == "parameters" else int(bool(sharding))
        found[held.owners[one.name]] += share * sent.size(one) + shared * held.division.size(one) / 2
    return found


def topology_facts(topology: Topology, traffic: Sequence[NodeTraffic]) -> tuple[tuple[str, str], ...]:
    """Lines of the plan, where there are several nodes.

    Example:
        >>> from lightning_pipe.text import several
        >>> for name, line in topology_facts(Topology(2, 2, node_size=2), [NodeTraffic("pipeline", 0, 2**20)]):
        ...     print(f"{name}: {line}")
        Nodes: node 0 has ranks 0, 1; node 1 has ranks 2, 3
        Between: in a step: rank_order="pipeline": 0 messages between stages, 1 MiB to sum gradients
        : the ranks of a pipeline are neighbours, for what stages send each other
    """
    nodes = topology.nodes
    if len(nodes) == 1:
        return ()
    shown = [
        f"node {number} has rank{'s' * (len(node) > 1)} {', '.join(map(str, node)) if len(node) < 5 else _span(node)}"
        for number, node in enumerate(nodes)
    ]
    if len(shown) > 4:
        shown = [*shown[:2], "…", shown[-1]]
    first, *others = (str(each) for each in traffic)
    if topology.replicas == 1:  # both orders are the same
        others = []
    reason = () if topology.replicas == 1 else (("", _reason(traffic)),)
    return (
        ("Nodes", "; ".join(shown)),
        ("Between", f"in a step: {first}"),
        *(("", f"instead of {other}") for other in others),
        *reason,
    )


_NEIGHBOURS: dict[RankOrder, str] = {
    "pipeline": "the ranks of a pipeline are neighbours, for what stages send each other",
    "replicas": "the holders of a stage are neighbours, for the sums of its gradients",
}


def _reason(traffic: Sequence[NodeTraffic]) -> str:
    """What the order of the ranks is for, and which of the two sends less between nodes where both are known."""
    why = _NEIGHBOURS[traffic[0].rank_order]
    known = [(each.sums + each.boundaries, each.rank_order) for each in traffic if each.boundaries is not None]
    if len(known) < 2:
        return why
    (less, order), (more, _) = sorted(known)
    verdict = (
        "both orders send as much"
        if less == more
        else f'rank_order="{order}" sends less: {memory(less)}, not {memory(more)}'
    )
    return f"{why}; {verdict}"


def _between_nodes(topology: Topology, edges: Edges) -> float:
    return sum(
        value
        for each in topology.tensor_slices
        for replica in range(topology.replicas)
        for (rank, peer), value in edges.items()
        if topology.node(each.process(replica, rank)) != topology.node(each.process(replica, peer))
    )


def _span(node: range) -> str:
    return f"{node[0]} to {node[-1]}"
