"""What a plan is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_pipe.config import Auto, BatchEquation, RankOrder, Sharding
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import Balance
from lightning_pipe.planning.cost_profile import CostProfile
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.transport.topology import Topology


@dataclass(frozen=True)
class PlanOptions:
    """The arguments of `lightning_pipe.plan` after the module.

    Raises:
        ConfigurationError: there is no rank, no sample, no pass, or a profile with several passes.
    """

    ranks: int
    batch: int
    schedule: str | Family | Schedule = "1f1b"
    stages: int | Auto = "auto"
    micro_batches: int | Auto = "auto"
    layers: str | Sequence[str] | None = None
    balance: Balance = "parameters"
    accumulation: int = 1
    recompute: Recompute = "never"
    profile: CostProfile | None = None
    accelerator: Literal["cpu", "gpu"] = "gpu"
    replicas: int = 1
    nodes: int = 1
    rank_order: RankOrder = "pipeline"
    passes: int = 1
    shard_optimizer: Sharding = False

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.batch < 1:
            raise ConfigurationError(
                f"A plan needs at least one rank and one sample, not ranks={self.ranks}, batch={self.batch}."
            )

        if self.passes < 1 or (self.passes > 1 and self.profile is not None):
            raise ConfigurationError(
                f"passes={self.passes} cannot be planned" + (" with a profile." if self.profile else "."),
                hint="Leave out the profile, which knows the times of one pass." if self.profile else "Use 1 or more.",
            )

    def topology(self, loss_rank: int) -> Topology:
        """Which process is which rank, with equally many processes on each node.

        Args:
            loss_rank: the rank with the last stage.

        Raises:
            ConfigurationError: the processes cannot be divided over the nodes.
        """
        processes = self.ranks * self.replicas
        if self.nodes < 1 or processes % self.nodes:
            raise ConfigurationError(
                f"{self.ranks} ranks x {self.replicas} replicas = {processes} processes cannot be divided over "
                f"{self.nodes} nodes.",
                hint="Lightning starts equally many processes on every node.",
            )
        return Topology.for_schedule(self.ranks, self.replicas, loss_rank, self.rank_order, processes // self.nodes)

    def equation(self, micro_batches: int) -> BatchEquation:
        """How the batch is divided.

        Args:
            micro_batches: those of one batch.
        """
        return BatchEquation(self.batch, micro_batches, self.replicas, self.accumulation)
