"""Which process is which rank of which pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from lightning_pipe.config import RankOrder
from lightning_pipe.errors import ConfigurationError


@dataclass(frozen=True)
class Topology:
    """The place of every process: ``replicas`` pipelines of ``ranks`` processes each.

    Processes with neighbouring numbers share a node, so ``rank_order`` says whose messages stay within one::

        4 ranks x 2 replicas    processes of pipeline 0    of pipeline 1
        "pipeline"              0 1 2 3                    4 5 6 7
        "replicas"              0 2 4 6                    1 3 5 7

    The rank with the loss is the first process of each pipeline, so that process 0 has it, where loggers, progress bars
    and the user's prints live. Ranks of linear schedules are reversed among the processes.

    Two numbers, and only one of them is shown. A *pipeline rank* is a row of the schedule: 0 holds the first stage of
    a linear schedule. A *process* has the global rank that Lightning logs. Plans, timelines, closing lines, errors
    and logs write "rank" for the global rank alone, by `describe`; rows of a schedule are called rows.

    In this room a *peer* is a pipeline rank of the same pipeline, the other end of a message. *Members* are the
    processes of a group, sorted. *Owners* are the pipeline ranks that have the true value of a parameter, and its
    *holders* the processes that have it: those ranks in all pipelines.

    With tensor parallelism each of these places is one of ``tensor`` processes with neighbouring numbers, which compute
    the layers of their stage together. Processes with the same ``tensor_rank`` exchange the messages of the pipelines
    among each other, as if there were no others; each of them sees itself and these in its topology.

    Args:
        ranks: processes in one pipeline.
        replicas: pipelines side by side (data parallelism).
        loss_rank: the pipeline rank that holds the last stage of pipe 0; -1: the last one.
        rank_order: whose processes have neighbouring numbers: ``"pipeline"``, those of a pipeline, or ``"replicas"``,
            those that hold the same stages.
        node_size: processes on each node; 0: all are on one.
        tensor: processes that compute a layer together (tensor parallelism).
        tensor_rank: which of them the processes of this topology are.

    Example:
        >>> topology = Topology(ranks=4, replicas=2, loss_rank=3)
        >>> topology.process(replica=1, rank=3)
        4
        >>> topology.locate(4)
        (1, 3)
        >>> topology.pipeline_processes(replica=0)
        (3, 2, 1, 0)
        >>> topology.replica_processes(rank=3)
        (0, 4)
        >>> Topology(ranks=2, replicas=2, rank_order="replicas", node_size=2).replica_processes(rank=0)
        (0, 1)
        >>> Topology(ranks=2, tensor=2, tensor_rank=1).same_tensor_rank, Topology(ranks=2, tensor=2).world_size
        ((1, 3), 4)
    """

    ranks: int
    replicas: int = 1
    loss_rank: int = 0
    rank_order: RankOrder = "pipeline"
    node_size: int = 0
    tensor: int = 1
    tensor_rank: int = 0

    def __post_init__(self) -> None:
        if self.rank_order not in get_args(RankOrder):
            raise ConfigurationError(
                f"rank_order={self.rank_order!r} is not known.",
                hint='Use "pipeline" (the ranks of a pipeline are neighbours) or "replicas" (those that hold the same '
                "stages are).",
            )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The pipeline rank of each process of a pipeline: neighbours in one are neighbours in the other."""
        step = -1 if self.loss_rank else 1
        return tuple((self.loss_rank + step * number) % self.ranks for number in range(self.ranks))

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.ranks * self.replicas * self.tensor

    @property
    def everyone(self) -> tuple[int, ...]:
        """All processes."""
        return tuple(range(self.world_size))

    @property
    def same_tensor_rank(self) -> tuple[int, ...]:
        """The processes of all pipelines with this tensor rank, sorted."""
        return tuple(range(self.tensor_rank, self.world_size, self.tensor))

    @property
    def tensor_slices(self) -> tuple[Topology, ...]:
        """The topologies of all tensor ranks."""
        return tuple(replace(self, tensor_rank=number) for number in range(self.tensor))

    def tensor_processes(self, process: int) -> tuple[int, ...]:
        """The processes that compute layers together with one, sorted."""
        first = process - process % self.tensor
        return tuple(range(first, first + self.tensor))

    @property
    def nodes(self) -> tuple[range, ...]:
        """The processes of each node."""
        size = self.node_size or self.world_size
        return tuple(range(first, min(first + size, self.world_size)) for first in range(0, self.world_size, size))

    def process(self, replica: int, rank: int) -> int:
        """The process that is ``rank`` of pipeline ``replica``."""
        of_replica, of_position = self._strides
        return (replica * of_replica + self.order.index(rank) * of_position) * self.tensor + self.tensor_rank

    def locate(self, process: int) -> tuple[int, int]:
        """The ``(replica, rank)`` of a process."""
        of_replica, of_position = self._strides
        place = process // self.tensor
        return place // of_replica % self.replicas, self.order[place // of_position % self.ranks]

    @property
    def _strides(self) -> tuple[int, int]:
        """How far replicas are apart, and how far neighbours in a pipeline."""
        return (1, self.replicas) if self.rank_order == "replicas" else (self.ranks, 1)

    def pipeline_processes(self, replica: int) -> tuple[int, ...]:
        """The processes of one pipeline, indexed by pipeline rank."""
        return tuple(self.process(replica, rank) for rank in range(self.ranks))

    def replica_processes(self, rank: int) -> tuple[int, ...]:
        """The processes that are ``rank`` of their pipelines, indexed by replica, and so sorted."""
        return tuple(self.process(replica, rank) for replica in range(self.replicas))

    def members(self, replica: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """The processes of some ranks of one pipeline, sorted: the form in which groups are named."""
        return tuple(sorted({self.process(replica, rank) for rank in ranks}))

    def holders(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The processes of some ranks of all pipelines, sorted: they hold the same stages."""
        return tuple(sorted(process for rank in set(ranks) for process in self.replica_processes(rank)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """How messages name each process."""
        return tuple(map(self.describe, self.everyone))

    def describe(self, process: int) -> str:
        """How messages name a process.

        Example:
            >>> Topology(ranks=2, replicas=2).describe(3)
            'rank 3 (replica 1)'
            >>> Topology(ranks=2, loss_rank=1).describe(0)
            'rank 0'
        """
        places = [f"replica {self.locate(process)[0]}"] * (self.replicas > 1)
        places += [f"tensor rank {process % self.tensor}"] * (self.tensor > 1)
        return f"rank {process} ({', '.join(places)})" if places else f"rank {process}"
