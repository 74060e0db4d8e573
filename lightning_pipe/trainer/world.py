"""The processes of a run: connected, arranged in pipelines and replicas, and able to agree."""

from __future__ import annotations

import atexit
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_pipe.config import RankOrder, RunLayout
from lightning_pipe.engine.first_batch.trial_runs import is_alone
from lightning_pipe.errors import CommunicationError, ConfigurationError, PipeError
from lightning_pipe.lightning_internals import all_gather_over, default_backend, reduce_over
from lightning_pipe.schedules import Family
from lightning_pipe.trainer.connect import connect, listen_on_loopback
from lightning_pipe.transport.arrangement import open_transport, topology_of
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.failures import FailureBoard, default_store

T = TypeVar("T")
_LATER = timedelta(seconds=10)
"""How much longer than the timeout an operation waits: until then the failure board has named every rank's place."""


def check_world_size(devices: int, num_nodes: int, environment: ClusterEnvironment) -> None:
    """Compare the processes that have come up with those that the Trainer asks for.

    Raises:
        ConfigurationError: the numbers differ; otherwise some would wait for processes that never come.
    """
    asked, found = num_nodes * devices, {"the cluster environment": environment.world_size()}
    if "WORLD_SIZE" in os.environ:
        found["the launcher (WORLD_SIZE)"] = int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        found["torch.distributed"] = dist.get_world_size()
    for who, size in found.items():
        if size != asked:
            raise ConfigurationError(
                f"The Trainer asks for {asked} processes (num_nodes={num_nodes} x devices={devices}), but {who} has "
                f"{size}.",
                hint=f"Start {asked} processes, or choose num_nodes and devices so that they multiply to {size}.",
            )


@dataclass
class World:
    """The processes, seen from one of them.

    Args:
        layout: sizes of pipelines and replicas.
        transport: this process's transport.
        replicas: torch's group of the processes with the same rank in all pipelines; ``None`` if there is one pipeline.
        local: while a user's step runs, in which not all processes take part: collectives concern the replicas alone.
    """

    layout: RunLayout
    transport: Transport
    replicas: Any | None = None
    local: bool = False
    _owner: int = field(default_factory=os.getpid, init=False, repr=False)

    @classmethod
    def open(
        cls,
        layout: RunLayout,
        family: Family,
        device: torch.device,
        environment: ClusterEnvironment,
        backend: str | None,
        timeout: timedelta,
        hosts: int = 1,
        rank_order: RankOrder = "pipeline",
    ) -> World:
        """Connect the processes. Collective.

        Args:
            layout: sizes of pipelines and replicas.
            family: the schedule: the rank with its loss becomes the first process of each pipeline.
            device: this process's device.
            environment: how the processes find each other.
            backend: torch.distributed's; ``None`` chooses by device.
            timeout: the longest that one process waits for another.
            hosts: on how many hosts the processes are.
            rank_order: whose processes have neighbouring numbers.
        """
        topology = topology_of(layout, family, rank_order, hosts)
        if topology.tensor > 1:
            topology = replace(topology, tensor_rank=environment.global_rank() % topology.tensor)
        if layout.world_size == 1:
            return cls(layout, open_transport(topology, device, timeout))
        backend = backend or default_backend(device)
        if hosts == 1:
            listen_on_loopback()
        with _connecting(timeout):
            connect(environment, backend, timeout, hosts)
            world = cls(layout, open_transport(topology, device, timeout + _LATER))
            if topology.replicas > 1:
                groups = [each.replica_processes(n) for n in range(topology.ranks) for each in topology.tensor_slices]
                made = [dist.new_group(sorted(group), timeout=timeout) for group in groups]
                own = world.transport.process
                world.replicas = next(each for each, group in zip(made, groups, strict=True) if own in group)
        FailureBoard(default_store(), world.transport).watch(stall=timeout.total_seconds())
        atexit.register(world.end)
        return world

    def end(self) -> None:
        """Close at the end of the process; after a failure others may be missing, and nobody waits for them."""
        if os.getpid() != self._owner:  # a copy of the process that the user's code has made: none of it is its own
            return
        board = self.transport.board
        if board is not None and board.noticed.is_set():
            board.close()
        else:
            self.close()
            if dist.is_initialized():
                dist.destroy_process_group()

    def close(self) -> None:
        """Let go of the other processes: sockets, threads, groups and the store. Idempotent."""
        atexit.unregister(self.end)
        if self.transport.board is not None:
            self.transport.board.close()
        self.replicas = None
        self.transport.close()

    @property
    def everyone(self) -> tuple[int, ...]:
        """All processes."""
        return self.transport.topology.everyone

    @cached_property
    def replica_members(self) -> tuple[int, ...]:
        """The processes with the same rank in all pipelines."""
        return tuple(sorted(self.transport.topology.replica_processes(self.transport.rank)))

    def share_randomness(self) -> int:
        """Continue everywhere from the random state of process 0, as one device would; returns its seed."""
        mine = (torch.get_rng_state(), torch.initial_seed())
        state, seed = self.transport.broadcast_object(mine, 0, self.everyone)
        torch.set_rng_state(state)
        return int(seed)

    def barrier(self) -> None:
        """Wait for all processes."""
        if not self.local:
            self.transport.barrier()

    def broadcast(self, obj: T, source: int) -> T:
        """The object of one process, on all."""
        if self.local:
            return obj
        shared: T = self.transport.broadcast_object(obj, source, self.everyone)
        return shared

    def reduce(self, value: Any, group: Any | None, op: ReduceOp | str | None) -> Any:
        """Reduce over the replicas; the ranks of a pipeline have the same value already."""
        group = self.replicas if group is None else group
        if group is None or not isinstance(value, Tensor) or is_alone():
            return value
        with self.transport.guarding("reduce a value over the replicas"):
            return reduce_over(value, group, reduce_op=op)

    def all_gather(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        """Gather from the replicas along a new first dimension; one replica gets the tensor itself, as one device."""
        group = self.replicas if group is None or group is dist.group.WORLD else group
        if group is not None and is_alone():
            return torch.stack([tensor] * self.layout.data_parallel_size)
        if group is None:
            return tensor
        with self.transport.guarding("gather a value from the replicas"):
            return all_gather_over(tensor, group=group, sync_grads=sync_grads)

    def agree(self, decision: bool, *, unanimous: bool) -> bool:
        """Whether all processes, or any of them, say yes."""
        # in a step only the ranks of the same stage are sure to ask
        members = self.replica_members if self.local else self.everyone
        return self.any_of([decision != unanimous], members)[0] != unanimous

    def any_counterpart(self, flags: list[bool]) -> list[bool]:
        """Whether any process says yes to each question, of those that have this rank in their pipeline."""
        flags = self.any_of(flags, self.replica_members)
        return self.any_of(flags, self.transport.topology.tensor_processes(self.transport.process))

    def any_of(self, flags: list[bool], members: tuple[int, ...]) -> list[bool]:
        """Whether any process of a group says yes to each question."""
        if len(members) == 1:
            return flags
        said = torch.tensor(flags, dtype=torch.long)
        self.transport.all_reduce(said, members, "max").wait()
        return [bool(each) for each in said]


@contextmanager
def _connecting(timeout: timedelta) -> Generator[None, None, None]:
    """Words for what torch raises while processes are connected."""
    try:
        yield
    except PipeError:
        raise
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        raise CommunicationError(
            f"The processes could not be connected: {reason}",
            hint="Look for the first error of another process; one may have been killed (out of memory?), or have "
            f"stood still for longer than {timeout.total_seconds():g} s.",
        ) from error
