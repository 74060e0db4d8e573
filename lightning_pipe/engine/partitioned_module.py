"""A module divided over the ranks of a pipeline: its stages, where they are, and who holds which value."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.construction import materialize
from lightning_pipe.engine.refusals import check_division
from lightning_pipe.errors import CutError, PartitionError
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm
from lightning_pipe.parameters.gradient_sync import Held
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.schedules.passes.recompute import with_recompute
from lightning_pipe.schedules.several_passes import several_passes
from lightning_pipe.sharding.roots import Root, roots_of
from lightning_pipe.sharding.values import T, give_values
from lightning_pipe.transport.base import Transport


@dataclass(eq=False, repr=False)
class PartitionedModule:
    """The facts of a division: what every rank knows of it, and how the module is freed, compared and put together.

    Nothing here runs a step.

    Args:
        module: the user's module, whole, with the same values on all ranks (or `synchronize` it).
        layers: the layer sequence with dotted names; empty while the module is whole on every rank.
        balance: the number of layers of each stage.
        family: the schedule family.
        transport: this process's transport.
        recompute: whether forward passes keep only their input and run again before their backward pass: ``"never"``,
            ``"always"``, or ``"except_last"`` for all but the last micro-batch of a stage.
        deferred_batch_norm: whether batch norm is to keep the statistics of whole batches, not of micro-batches.
        passes: how often a training step runs the layers.
        before: the same module over the same ranks in an earlier run, if it is still divided.

    Attributes:
        names: dotted names of the layers.
        stage_layers: for each stage its range of layers.
        synchronous: whether every batch is finished before the next one begins.
        placement: ``(pipe, stage) -> rank``.
        loss_ranks: the ranks that compute losses.
        stages_here: the stages of this rank.
        ownership: who holds which parameter and buffer.

    Raises:
        PartitionError: the balance does not add up to the layers.
        ScheduleError: the schedule cannot be built for these ranks and stages.
        ConfigurationError: see `check_division`.
    """

    module: nn.Module
    layers: list[tuple[str, nn.Module]]
    balance: list[int]
    family: Family
    transport: Transport
    _: KW_ONLY
    recompute: Recompute = "never"
    deferred_batch_norm: bool = False
    passes: int = 1
    before: InitVar[PartitionedModule | None] = None

    def __post_init__(self, before: PartitionedModule | None) -> None:
        module, balance, rank = self.module, self.balance, self.transport.rank
        if sum(balance) != len(self.layers):
            raise PartitionError(
                f"The balance {balance} adds up to {sum(balance)}; there are {len(self.layers)} layers."
            )
        check_division(module, self.layers, len(balance))
        self.names = [name for name, _ in self.layers]
        self.stage_layers = [range(start, stop) for start, stop in pairwise([0, *accumulate(balance)])]
        self.passes = self.passes if len(balance) > 1 else 1  # one stage runs any step
        sample = self.sample_schedule()
        self.synchronous = sample.synchronous
        self.placement = dict(sample.placement)
        self.loss_ranks = sample.loss_ranks
        self.stages_here = sample.stages_of(rank)
        layer_ranks = [self.holders(stage) for stage, span in enumerate(self.stage_layers) for _ in span]
        known, names = None if before is None else before.ownership, map(self.transport.describe, self.transport.peers)
        self.ownership: Ownership = Ownership(
            module, self.layers, layer_ranks, rank, self.loss_ranks, tuple(names), known
        )

    # ------------------------------------------------------------------ ranks and processes

    @property
    def whole(self) -> bool:
        """Whether the module is not divided yet: every rank holds all of it."""
        return not self.layers

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank computes losses."""
        return self.transport.rank in self.loss_ranks

    @property
    def ends_early(self) -> bool:
        """Whether some runs of a training step end early on this rank: all but those of the last stage and pass."""
        return not (self.is_loss_rank and len(self.stages_here) == 1 and self.passes == 1)

    @property
    def linear(self) -> bool:
        """Whether every rank holds one stage of one pipe: batches then pass each rank once, in one direction."""
        return len(self.placement) == len(set(self.placement.values())) == self.transport.topology.ranks

    @cached_property
    def pipeline_members(self) -> tuple[int, ...]:
        """The processes of this pipeline, sorted."""
        return tuple(sorted(self.transport.peers))

    @cached_property
    def roots(self) -> list[Root]:
        """The layers of this rank and the modules outside the layers."""
        return roots_of(self.module, self.layers, self.stage_layers, self.stages_here)

    # ------------------------------------------------------------------ schedule and stages

    def schedule(self, micro_batches: int, passes: int | None = None) -> Schedule:
        """The training schedule for a number of micro-batches, of all passes or of so many."""
        one = self.family.build(self.transport.topology.ranks, micro_batches, stages=len(self.balance))
        return with_recompute(several_passes(one, self.passes if passes is None else passes), self.recompute)

    def sample_schedule(self, passes: int = 1) -> Schedule:
        """A schedule with so many micro-batches that every rank computes, and every channel is used."""
        return self.schedule(max(2 * self.transport.topology.ranks, self.family.pipes), passes)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The pipeline ranks that hold a stage, ascending."""
        return tuple(sorted({rank for (_, other), rank in self.placement.items() if other == stage}))

    @property
    def places(self) -> tuple[dict[str, int], list[str]]:
        """By the names of layers, their stages; and by stage, which ranks run it, in words."""
        stages = {self.names[number]: stage for stage, span in enumerate(self.stage_layers) for number in span}
        names = self.ownership.rank_names
        return stages, [" and ".join(names[rank] for rank in self.holders(each)) for each in range(len(self.balance))]

    def evaluated_by(self, rank: int) -> list[str]:
        """The layers that a pipeline rank runs in an evaluation: those of the first pipe."""
        spans = enumerate(self.stage_layers)
        return [self.names[i] for stage, span in spans if self.placement[0, stage] == rank for i in span]

    # ------------------------------------------------------------------ who holds what

    def holds(self, name: str) -> bool:
        """Whether this rank has the true value of a named parameter or buffer."""
        return self.ownership.holds(name)

    def owners(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that have the true value of a named parameter or buffer."""
        return self.ownership.owners(name)

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters this rank holds, each once."""
        return ((name, p) for name, p in self.module.named_parameters() if self.holds(name))

    def held_parameters(self) -> Iterator[Held]:
        """The parameters of this rank, with the stage that alone uses each."""
        stages: dict[int, set[int]] = {}
        for stage in self.stages_here:
            for number in self.stage_layers[stage]:
                for parameter in self.layers[number][1].parameters():
                    stages.setdefault(id(parameter), set()).add(stage)
        for name, parameter in self.local_parameters():
            owners, users = self.owners(name), stages.get(id(parameter), set())
            # A parameter that another stage, or code outside the layers, also uses gets its last gradient elsewhere.
            is_of_one = len(users) == 1 and self.ownership.in_layers_alone(name) and owners == self.holders(min(users))
            yield parameter, owners, min(users) if is_of_one else None

    def owner_sets(self) -> list[tuple[int, ...]]:
        """The different sets of ranks that hold something in common."""
        return list(dict.fromkeys(self.owners(name) for name, _ in named_tensors(self.module)))

    # ------------------------------------------------------------------ free, compare and put together

    def partition(self) -> None:
        """Free the layers of other ranks: their parameters become placeholders in place."""
        self.ownership.release_layers()

    def synchronize(self, divide: Callable[[Root], T] | None = None) -> list[T]:
        """Give all holders of a parameter or buffer the value of the first one of replica 0; see `give_values`."""
        return give_values(self.module, self.layers, self.roots, self.ownership, self.transport, divide)

    def restore(self) -> None:
        """Give every rank the whole module again. Collective over the pipeline.

        What other ranks hold arrives in host memory: the whole module need not fit on one device.
        """
        materialize(self.module)
        lost = self.agree_on_lost()
        if lost and self.transport.rank == 0:
            warnings.warn(_lost(lost), stacklevel=2)
        self.ownership.restore(self._fetch, without=lost)
        DeferredBatchNorm.revert(self.module)

    def _fetch(self, _: str, owners: tuple[int, ...], tensor: Tensor) -> Tensor:
        """The value of one owner, on all ranks of the pipeline."""
        transport, members = self.transport, self.pipeline_members
        source = transport.peers[owners[0]]
        shape, dtype = transport.broadcast_object((tensor.shape, tensor.dtype), source, members)
        if transport.process == source:
            # Conjugated and negated views are flags on a tensor, which a message of plain bytes would lose.
            data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        else:
            data = torch.empty(shape, dtype=dtype)
        transport.broadcast(data, source, members).wait()
        return data

    def whole_state(self) -> dict[str, Any]:
        """The ``state_dict`` of the whole module, copied to host memory, on all ranks. Collective over the pipeline."""
        self.check_values()
        state: dict[str, Any] = self.module.state_dict()
        for name, value in state.items():
            if not isinstance(value, Tensor):  # what get_extra_state() returns where the layer runs
                stage = next((stage for layer, stage in self.places[0].items() if name.startswith(f"{layer}.")), None)
                rank = self.loss_ranks[0] if stage is None else self.holders(stage)[0]
                state[name] = self.transport.broadcast_object(value, self.transport.peers[rank], self.pipeline_members)
            elif len(self.owners(name)) == self.transport.topology.ranks:
                state[name] = value.to("cpu", copy=True)
            else:
                state[name] = self._fetch(name, self.owners(name), value).clone()
        return state

    def check_values(self) -> None:
        """Raise if no rank has some value. Collective over the pipeline."""
        if lost := self.agree_on_lost():
            raise CutError(
                _lost(lost),
                hint="Only tensors of one rank can follow each other. For averaged weights use Lightning's callback "
                "EMAWeightAveraging.",
            )

    def agree_on_lost(self) -> list[str]:
        """Learn who has what hooks have changed by parameters of some ranks. Collective over the pipeline.

        Returns:
            Names of what no rank has.
        """
        transport = self.transport
        return self.ownership.agree_on_lost(lambda mine: transport.all_gather_object(mine, transport.peers))

    @cached_property
    def norms(self) -> dict[DeferredBatchNorm, str]:
        """The deferred batch norms and their names."""
        return {part: name for name, part in self.module.named_modules() if isinstance(part, DeferredBatchNorm)}


def _lost(names: Sequence[str]) -> str:
    return (
        f"No rank has the value of '{names[0]}' ({len(names)} such parameters and buffers): it was changed by those of "
        "several ranks."
    )
