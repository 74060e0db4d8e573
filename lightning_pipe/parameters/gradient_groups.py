"""Whose gradients are summed with whose, and when: known after the first training batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from lightning_pipe.local_parts import DATA, TENSOR, dimensions
from lightning_pipe.parameters.gradient_sync import GradientSync
from lightning_pipe.parameters.zero import HolderGroup, OptimizerShards
from lightning_pipe.transport.base import Transport

if TYPE_CHECKING:
    from lightning_pipe.sharding.fully_sharded import FullySharded

# Keys of reductions: what comes first in a group is what is largest.
_DIVIDED, _SHARED, _STAGE = -1, 0, 1


class HeldParameter(NamedTuple):
    """A parameter that this rank holds.

    Args:
        parameter: the parameter.
        owners: the pipeline ranks that hold it, ascending.
        stage: the stage that alone uses it, on all of these ranks; ``None`` if there is no such stage.
    """

    parameter: nn.Parameter
    owners: tuple[int, ...]
    stage: int | None


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

    def form(self, held: Iterable[HeldParameter], stages: Iterable[int]) -> None:
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


def uses_of_ranks(
    transport: Transport, placement: Mapping[tuple[int, int], int], used: Iterable[str]
) -> Sequence[set[str]]:
    """For each pipeline rank the outside parameters that it uses. Collective over the world.

    Args:
        transport: the rank's transport.
        placement: ``(pipe, stage) -> rank``.
        used: what this rank has used.
    """
    topology = transport.topology
    by_rank: list[set[str]] = [set() for _ in range(topology.ranks)]
    found = transport.all_gather_object(sorted(used), topology.same_tensor_rank)
    for process, names in zip(topology.same_tensor_rank, found, strict=True):
        by_rank[topology.locate(process)[1]].update(names)
    # a rank that has had no micro-batch yet will use what others with the same stages do
    stages = [
        frozenset(stage for (_, stage), owner in placement.items() if owner == rank) for rank in range(len(by_rank))
    ]
    return [
        set().union(*(used for used, theirs in zip(by_rank, stages, strict=True) if theirs == own)) for own in stages
    ]
