"""What the transports need of torch.distributed beside its process groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.transport.topology import Topology

ABORT_TAG = (1 << 16) - 1
"""The tag of a message that nobody sends."""


def own_process(topology: Topology) -> int:
    """This process's number in the default group, which must have the processes of the topology."""
    if (found := dist.get_world_size()) != topology.world_size:
        raise ConfigurationError(
            f"{topology.ranks} ranks x {topology.replicas} replicas x {topology.tensor} need {topology.world_size} "
            f"processes; {found} have come up.",
            hint="Choose devices and num_nodes so that they multiply to that number.",
        )
    return dist.get_rank()


def default_store() -> Store:
    """The store over which the processes have found each other."""
    # torch has no public way to it (2.13); Lightning and torch's own pipelining use the same function.
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def abort_gloo(group: ProcessGroup) -> None:
    """Make all pending operations of a Gloo group fail, here and at the peers.

    Gloo's own abort leaves pending operations alone (torch 2.13). A wait that times out closes the connections.
    """
    if group.size() == 1:
        return
    try:
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass
