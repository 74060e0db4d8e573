"""The processes as torch's mesh of devices: by pipeline rank, replica and tensor rank."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pipe.local_parts import DATA, PIPELINE, TENSOR
from lightning_pipe.transport.base import Transport

NAMES = (PIPELINE, DATA, TENSOR)


def device_mesh(transport: Transport) -> Any:
    """The mesh of all processes, with groups that fail when the transport does. Collective over the world.

    Args:
        transport: this process's, of several.

    Returns:
        torch's ``DeviceMesh``; ``mesh["data_parallel"]`` and ``mesh["tensor_parallel"]`` are as in Lightning's
        ``ModelParallelStrategy``.
    """
    from torch.distributed.device_mesh import DeviceMesh

    topology = transport.topology
    places = torch.tensor(
        [
            [[each.process(replica, rank) for each in topology.tensor_slices] for replica in range(topology.replicas)]
            for rank in range(topology.ranks)
        ]
    )
    lines = [places.movedim(dim, -1).reshape(-1, places.shape[dim]).tolist() for dim in range(places.ndim)]
    groups = [transport.mesh_group(line) for line in lines]
    return DeviceMesh.from_group(groups, transport.device.type, mesh=places, mesh_dim_names=NAMES)
