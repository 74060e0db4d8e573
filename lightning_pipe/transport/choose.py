"""Chooses the transport for the processes and the device that there are."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.gloo import GlooTransport
from lightning_pipe.transport.nccl import NcclTransport
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology


def open_transport(topology: Topology, device: torch.device, timeout: timedelta, *, local: bool = True) -> Transport:
    """This process's transport; collective over the world.

    Args:
        topology: the place of every process. One process alone needs no process group.
        device: where this process's stages compute.
        timeout: the longest that an operation may take.
        local: whether processes of one host may exchange messages through shared memory.

    Returns:
        NCCL if the default process group uses it for this device, else Gloo, with tensors of a GPU staged through
        pinned host memory: slower, but several processes may share one GPU.
    """
    if topology.world_size == 1:
        return SingleProcess(device, timeout)
    if device.type == "cuda" and "nccl" in dist.get_backend_config():
        return NcclTransport(topology, device, timeout)
    return GlooTransport(topology, device, timeout, local=local)
