"""How many ranks, replicas and stages a run has, which process is which rank, and how they reach each other."""

from __future__ import annotations

import warnings
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_pipe.config import Auto, RankOrder, RunLayout, layout
from lightning_pipe.schedules import Family
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.gloo import GlooTransport
from lightning_pipe.transport.nccl import NcclTransport
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology


def arrange(
    family: Family,
    world_size: int,
    pipeline_parallel_size: int | Auto = "auto",
    data_parallel_size: int | Auto = "auto",
    stages: int | Auto = "auto",
    tensor_parallel_size: int = 1,
) -> RunLayout:
    """The sizes of a run; a schedule made for a number of stages says that number.

    Args:
        family: the schedule.
        world_size: number of processes.
        pipeline_parallel_size: ranks in one pipeline.
        data_parallel_size: pipelines side by side.
        stages: stages that the module is divided into.
        tensor_parallel_size: processes that compute a layer together.

    Example:
        >>> from lightning_pipe.schedules import get
        >>> arrange(get("gpipe"), world_size=8, data_parallel_size=2)
        RunLayout(pipeline_parallel_size=4, data_parallel_size=2, stages=4, tensor_parallel_size=1)
    """
    sizes = layout(world_size, pipeline_parallel_size, data_parallel_size, tensor_parallel_size=tensor_parallel_size)
    own = family.placed(sizes.pipeline_parallel_size, None)[1]
    stages = own if stages == "auto" else stages
    if own < sizes.pipeline_parallel_size:  # replicated stages: fewer than ranks
        return replace(sizes, stages=stages)
    return replace(sizes, stages=layout(sizes.pipeline_parallel_size, stages=stages).stages)


def topology_of(layout: RunLayout, family: Family, rank_order: RankOrder = "pipeline", hosts: int = 1) -> Topology:
    """The place of every process: the rank with the loss becomes the first process of each pipeline.

    Args:
        layout: sizes of pipelines and replicas.
        family: the schedule.
        rank_order: whose processes have neighbouring numbers.
        hosts: on how many hosts the processes are.
    """
    with warnings.catch_warnings():  # that one micro-batch is off the family's multiples concerns nobody
        warnings.simplefilter("ignore")
        loss_rank = family.build(layout.pipeline_parallel_size, 1, stages=layout.stages).loss_ranks[0]
    sizes, node_size = (layout.pipeline_parallel_size, layout.data_parallel_size), -(-layout.world_size // hosts)
    return Topology(*sizes, loss_rank, rank_order, node_size, layout.tensor_parallel_size)


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
