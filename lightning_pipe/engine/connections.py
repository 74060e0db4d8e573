"""The process groups and channels that a pipeline needs, made before the first message."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.engine.partitioned_module import PartitionedModule
from lightning_pipe.schedules import Action, Kind, forward_only, lower
from lightning_pipe.transport.base import Channel, Direction, Lane, Transport

_DIRECTIONS: dict[Kind, Direction] = {Kind.SEND_FORWARD: "forward", Kind.SEND_BACKWARD: "backward"}


def connect(division: PartitionedModule, skips: Sequence[tuple[int, int]]) -> None:
    """Prepare all groups and channels. Collective: every process does so in the same order, or the first would hang.

    Args:
        division: the module over the ranks.
        skips: pairs of stages, not neighbours, of which the first sends to the second.
    """
    transport, topology = division.transport, division.transport.topology
    groups = [topology.members(replica, range(topology.ranks)) for replica in range(topology.replicas)]
    groups += [tuple(sorted(topology.replica_processes(rank))) for rank in range(topology.ranks)]
    groups += [topology.holders(owners) for owners in division.owner_sets()]
    # Without repetitions, and in this order: processes make groups together, one after the other.
    transport.make_groups(list(dict.fromkeys(groups)))
    # An evaluation may send on other channels than training.
    sample = division.sample_schedule()
    connect_program(transport, lower(sample, skips), lower(forward_only(sample, 1), skips))


def connect_program(transport: Transport, *programs: Sequence[Sequence[Action]]) -> None:
    """Prepare the channels of some programs. Collective.

    Args:
        transport: the rank's transport.
        programs: for each rank its lowered actions.
    """
    channels: dict[Channel, None] = {}
    for program in programs:
        for rank, actions in enumerate(program):
            channels |= {channel: None for action in actions if (channel := _channel(rank, action)) is not None}
    transport.connect(channels)


def _channel(rank: int, action: Action) -> Channel | None:
    """The channel that an action of a rank sends on."""
    if action.kind not in _DIRECTIONS or action.peer is None:
        return None
    return Channel(rank, action.peer, Lane(_DIRECTIONS[action.kind], action.pipe))
