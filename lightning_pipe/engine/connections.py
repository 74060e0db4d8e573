"""The process groups and channels that a pipeline needs, made before the first message."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.engine.partitioned_module import PartitionedModule
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.transport.base import Channel, Direction, Lane

_DIRECTIONS: dict[Kind, Direction] = {Kind.SEND_FORWARD: "forward", Kind.SEND_BACKWARD: "backward"}


def connect(division: PartitionedModule, programs: Sequence[Sequence[Sequence[Action]]]) -> None:
    """Prepare all groups and channels. Collective: every process does so in the same order, or the first would hang.

    Args:
        division: the module over the ranks.
        programs: each has for every rank its lowered actions.
    """
    transport, topology = division.transport, division.transport.topology
    groups = [topology.members(replica, range(topology.ranks)) for replica in range(topology.replicas)]
    groups += [tuple(sorted(topology.replica_processes(rank))) for rank in range(topology.ranks)]
    groups += [topology.holders(owners) for owners in division.owner_sets()]
    # Without repetitions, and in this order: processes make groups together, one after the other.
    transport.make_groups(list(dict.fromkeys(groups)))
    for program in programs:
        channels = [
            Channel(rank, action.peer, Lane(_DIRECTIONS[action.kind], action.pipe))
            for rank, actions in enumerate(program)
            for action in actions
            if action.kind in _DIRECTIONS and action.peer is not None
        ]
        transport.connect(channels)
