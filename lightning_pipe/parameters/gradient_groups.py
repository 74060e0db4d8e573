"""Whose gradients are summed with whose, and when: known after the first training batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from lightning_pipe.local_parts import DATA, TENSOR, dimensions
from lightning_pipe.parameters.gradient_sync import GradientSync
from lightning_pipe.parameters.zero import HolderGroup, OptimizerShards
from lightning_pipe.transport.base import Transport

if TYPE_CHECKING:
    from lightning_pipe.sharding.fully_sharded import FullySharded

# Keys of reductions: what comes first in a group is what is largest.
_DIVIDED, _SHARED, _STAGE = -1, 0, 1


Held = tuple[nn.Parameter, tuple[int, ...], int | None]
"""A parameter of this rank, the pipeline ranks that hold it, ascending, and the stage that alone uses it, if any."""


class GradientGroups(GradientSync):
    """Sums the gradients of replicas, of copies of a stage and of tied parameters over a batch.

    Parameters of one stage alone are reduced as soon as the stage is done, all others at the end of the batch.

    Args:
        transport: the rank's transport.

    Attributes:
        shards: divides the parameters that other processes hold as well over these; nothing until `form`.
        scattered: whether a sum goes to the process that updates the parameter alone; to be set before `form`.
        sharded: has the parameters that processes divide: none has all gradients of its stages; ``None``: none does.
        overlapped: whether a stage that is done is reduced at once; otherwise all wait for `finish`.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.shards = OptimizerShards((), transport)
        self.sharded: FullySharded | None = None
        self.scattered = self.overlapped = False

    def form(self, held: Iterable[Held], stages: Iterable[int]) -> None:
        """Take up the parameters of this rank.

        Args:
            held: the parameters.
            stages: the stages of this rank.
        """
        by_key: dict[tuple[int, ...], list[nn.Parameter]] = {(_STAGE, stage): [] for stage in stages}
        members, topology = dict[tuple[int, ...], tuple[int, ...]](), self._transport.topology
        for parameter, owners, stage in held:
            divided = DATA in dimensions(parameter)  # the replicas have summed it already
            key = (_DIVIDED, *owners) if divided else (_SHARED, *owners) if stage is None else (_STAGE, stage)
            by_key.setdefault(key, []).append(parameter)
            members[key] = topology.members(self._transport.replica, owners) if divided else topology.holders(owners)
        shared = [
            HolderGroup(members[key], tuple(by_key[key]), first=key[-1])
            for key in sorted(members)
            if len(members[key]) > 1
        ]
        self._transport.open_groups(group.members for group in shared)
        self.shards = OptimizerShards(shared, self._transport)
        # Parameters of one process are reduced as well, which does nothing: every stage then has its key.
        self._entries.clear()
        for key, parameters in by_key.items():
            of_key = members.get(key, (self._transport.process,))
            self.add(key, parameters, of_key, self.shards.owner if self.scattered else None)

    @property
    def members_with_all(self) -> tuple[int, ...]:
        """The processes that have all sums of gradients between them: a pipeline's, or all where these are divided."""
        topology = self._transport.topology
        if self.sharded is not None or (self.scattered and self._entries):
            return topology.everyone
        return tuple(sorted(topology.pipeline_processes(self._transport.replica)))

    def counts(self, parameter: nn.Parameter, first: bool) -> bool:
        """Whether this process is the one of `members_with_all` that counts a parameter in sums over the model.

        Args:
            parameter: one that this rank holds.
            first: whether this rank is the first of the pipeline's ranks that hold it.
        """
        if self.sharded is not None:
            places = {DATA: self._transport.replica, TENSOR: self._transport.topology.tensor_rank}
            return first and not any(places[each] for each in places.keys() - dimensions(parameter))
        return self.shards.mine(parameter) if self.scattered and self._entries else first

    def stage_done(self, stage: int) -> None:
        """The gradients of a stage are complete on this rank."""
        if self.sharded is not None:
            self.sharded.stage_done(stage)
        if self.overlapped and self._entries:
            self.start((_STAGE, stage))
