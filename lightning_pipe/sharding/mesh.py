"""The processes as torch's mesh of devices: by pipeline rank, replica and tensor rank."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.local_parts import DATA, PIPELINE, TENSOR, count_all_parts
from lightning_pipe.transport.base import Transport

NAMES = (PIPELINE, DATA, TENSOR)
_MADE: list[Transport] = []
"""What the meshes of this process's runs go through."""


def device_mesh(transport: Transport) -> Any:
    """The mesh of all processes, with groups that fail when the transport does. Collective over the world.

    Args:
        transport: this process's, of several.

    Returns:
        torch's ``DeviceMesh``; ``mesh["data_parallel"]`` and ``mesh["tensor_parallel"]`` are as in Lightning's
        ``ModelParallelStrategy``.

    Raises:
        ConfigurationError: a run of this process with a mesh has failed. A mesh is equal to another one of the same
            processes, and torch (2.13) keeps by it which groups operations on DTensors go through: those have ended.
    """
    if any(each.board is not None and each.board.failure is not None for each in _MADE):
        raise ConfigurationError(
            "A run of these processes with divided parameters has failed. torch would let this run communicate through "
            "that run's connections, which have ended.",
            hint="Start the processes anew for each run behind an error with tensor_parallel_size, "
            'shard_optimizer="parameters" or a module that divides itself.',
        )
    _MADE.append(transport)
    count_all_parts()
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
