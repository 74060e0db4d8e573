"""Which process is which rank of which pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipe.errors import ConfigurationError


@dataclass(frozen=True)
class Topology:
    """The place of every process: ``replicas`` pipelines of ``ranks`` processes each.

    The processes of a pipeline are neighbours: pipeline 0 has the processes ``0 … ranks-1``, pipeline 1 the next ones.
    Within a pipeline, ``order`` says which pipeline rank each of them is, so that the rank with the loss can be
    process 0, where loggers, progress bars and the user's prints live.

    Two numbers, and only one of them is shown. A *pipeline rank* is a row of the schedule: 0 holds the first stage of
    a linear schedule. A *process* has the global rank that Lightning logs. Plans, timelines, closing lines, errors
    and logs write "rank" for the global rank alone, by `describe`; rows of a schedule are called rows.

    In this room a *peer* is a pipeline rank of the same pipeline, the other end of a message. *Members* are the
    processes of a group, sorted. *Owners* are the pipeline ranks that have the true value of a parameter, and its
    *holders* the processes that have it: those ranks in all pipelines.

    Args:
        ranks: processes in one pipeline.
        replicas: pipelines side by side (data parallelism).
        order: the pipeline rank of each process of a pipeline; empty means ``0, 1, …``.

    Raises:
        ConfigurationError: sizes below one, or an order that is no permutation of the ranks.

    Example:
        >>> topology = Topology(ranks=4, replicas=2, order=(3, 2, 1, 0))
        >>> topology.process(replica=1, rank=3)
        4
        >>> topology.locate(4)
        (1, 3)
        >>> topology.pipeline_processes(replica=0)
        (3, 2, 1, 0)
        >>> topology.replica_processes(rank=3)
        (0, 4)
    """

    ranks: int
    replicas: int = 1
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.replicas < 1:
            raise ConfigurationError(
                f"A topology needs at least one rank and one replica, not {self.ranks} and {self.replicas}."
            )
        order = tuple(self.order) or tuple(range(self.ranks))
        if sorted(order) != list(range(self.ranks)):
            raise ConfigurationError(
                f"The order {order} must hold each of the {self.ranks} pipeline ranks exactly once.",
                hint=f"For example order={tuple(reversed(range(self.ranks)))}.",
            )
        object.__setattr__(self, "order", order)

    @classmethod
    def for_schedule(cls, ranks: int, replicas: int = 1, loss_rank: int | None = None) -> Topology:
        """Order the ranks so that the one with the loss is the first process of its replica.

        Ranks that are neighbours in the pipeline stay neighbours among the processes.

        Args:
            ranks: processes in one pipeline.
            replicas: pipelines side by side.
            loss_rank: the pipeline rank that holds the last stage of pipe 0; ``None`` means the last rank.

        Returns:
            The topology: reversed order for linear schedules, plain order where rank 0 has the loss.

        Example:
            >>> Topology.for_schedule(ranks=4, loss_rank=3).order
            (3, 2, 1, 0)
            >>> Topology.for_schedule(ranks=4, loss_rank=0).order
            (0, 1, 2, 3)
        """
        loss_rank = ranks - 1 if loss_rank is None else loss_rank
        if not 0 <= loss_rank < max(ranks, 1):
            raise ConfigurationError(f"The loss is said to be on rank {loss_rank}; the pipeline has {ranks} ranks.")
        if loss_rank == 0:
            return cls(ranks, replicas)
        return cls(ranks, replicas, tuple((loss_rank - step) % ranks for step in range(ranks)))

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.ranks * self.replicas

    def process(self, replica: int, rank: int) -> int:
        """The process that is ``rank`` of pipeline ``replica``."""
        self._check("replica", replica, self.replicas)
        self._check("rank", rank, self.ranks)
        return replica * self.ranks + self.order.index(rank)

    def locate(self, process: int) -> tuple[int, int]:
        """The ``(replica, rank)`` of a process."""
        self._check("process", process, self.world_size)
        replica, position = divmod(process, self.ranks)
        return replica, self.order[position]

    def pipeline_processes(self, replica: int) -> tuple[int, ...]:
        """The processes of one pipeline, indexed by pipeline rank."""
        return tuple(self.process(replica, rank) for rank in range(self.ranks))

    def replica_processes(self, rank: int) -> tuple[int, ...]:
        """The processes that are ``rank`` of their pipelines, indexed by replica."""
        return tuple(self.process(replica, rank) for replica in range(self.replicas))

    def members(self, replica: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """The processes of some ranks of one pipeline, sorted: the form in which groups are named."""
        return tuple(sorted({self.process(replica, rank) for rank in ranks}))

    def holders(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The processes of some ranks of all pipelines, sorted: they hold the same stages."""
        return tuple(sorted(process for rank in set(ranks) for process in self.replica_processes(rank)))

    def describe(self, process: int) -> str:
        """How messages name a process.

        Example:
            >>> Topology(ranks=2, replicas=2).describe(3)
            'rank 3 (replica 1)'
            >>> Topology(ranks=2, order=(1, 0)).describe(0)
            'rank 0'
        """
        replica, _ = self.locate(process)
        return f"rank {process}" if self.replicas == 1 else f"rank {process} (replica {replica})"

    def _check(self, what: str, value: int, limit: int) -> None:
        if not 0 <= value < limit:
            raise ConfigurationError(
                f"There is no {what} {value}: {self.ranks} ranks x {self.replicas} replicas end at {limit - 1}."
            )
