"""A module over a pipeline: partition, training batches, evaluation batches, restoration. Knows no trainer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.engine.asynchronous import AsynchronousPipeline, CallResult
from lightning_pipe.engine.boundary_exchange import BoundaryExchange
from lightning_pipe.engine.containers import signature
from lightning_pipe.engine.executor import Executor
from lightning_pipe.engine.first_batch.loss_check import LossCheck
from lightning_pipe.engine.skip_routes import SkipRoutes
from lightning_pipe.engine.stage import Batch, Stages, StepFunction
from lightning_pipe.errors import ConfigurationError, CutError, PartitionError
from lightning_pipe.intercept.interceptor import Interceptor
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.intercept.recompute import BufferGuard
from lightning_pipe.parameters.buffer_sync import BufferSync
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm, Statistics, deferred_norms, discard_all
from lightning_pipe.parameters.gradient_groups import GradientGroups, HeldParameter, uses_of_ranks
from lightning_pipe.parameters.ownership import Ownership, named_tensors
from lightning_pipe.schedules import Action, Family, Kind, Schedule, forward_only, lower
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.schedules.passes.recompute import with_recompute
from lightning_pipe.simulate import Event, Timeline
from lightning_pipe.transport.base import Channel, Lane, Transport


class Pipeline:
    """Runs a user's steps over the ranks of a pipeline and its replicas.

    Args:
        module: the user's module, whole, with the same values on all ranks (or `synchronize` it).
        layers: the layer sequence with dotted names.
        balance: the number of layers of each stage.
        family: the schedule family.
        transport: this process's transport.
        recompute: whether forward passes keep only their input and run again before their backward pass: ``"never"``,
            ``"always"``, or ``"except_last"`` for all but the last micro-batch of a stage.
        deferred_batch_norm: let batch norm keep the statistics of whole batches, not of micro-batches.

    Attributes:
        elapsed: seconds of all training batches but the first.
        busy: seconds of them that this rank computed.
        reductions: sums the gradients of parameters that other processes hold as well.
        gradients_divided: whether holders of the same parameters have dropped gradients since the last batch.

    Raises:
        PartitionError: the balance does not add up to the layers.
        ScheduleError: the schedule cannot be built for these ranks and stages.

    Example:
        One process, two stages, three micro-batches::

            transport, = memory_world(Topology(ranks=1))
            pipeline = Pipeline(module, find_layers(module), [2, 2], GPipe(), transport)
            losses = pipeline.train(step, micro_batches, weights=[1 / 3] * 3, seed=0)
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        balance: Sequence[int],
        family: Family,
        transport: Transport,
        *,
        recompute: Recompute = "never",
        deferred_batch_norm: bool = False,
    ) -> None:
        if sum(balance) != len(layers):
            raise PartitionError(
                f"The balance {list(balance)} adds up to {sum(balance)}; there are {len(layers)} layers."
            )
        self.module, self.transport, self.family = module, transport, family
        self.recompute: Recompute = recompute
        self.layers, self.balance = list(layers), list(balance)
        self.names = [name for name, _ in layers]
        self._topology = transport.topology
        self._probed = max(2 * self._topology.ranks, family.pipes)
        probe = self.schedule(self._probed)
        self.synchronous = probe.synchronous
        self.placement = dict(probe.placement)
        self.loss_ranks = probe.loss_ranks
        bounds = [0, *accumulate(balance)]
        self.stage_layers = [range(start, stop) for start, stop in pairwise(bounds)]
        stage_ranks = [probe.holders(stage) for stage in range(len(balance))]
        self.stages_here = probe.stages_of(transport.rank)
        layer_ranks = [stage_ranks[stage] for stage, span in enumerate(self.stage_layers) for _ in span]
        self.ownership = Ownership(
            module, self.layers, layer_ranks, transport.rank, self._topology.ranks, self.loss_ranks, transport.names
        )
        self.skips = SkipRoutes(module, self.layers, self.stage_layers)
        self._learnt: set[bool] = set()
        self.reductions = GradientGroups(transport)
        self.executor = Executor(
            Stages(
                Interceptor(module, self.layers, tells=transport.process == 0),
                self.stage_layers,
                self.names,
                self.ownership,
                transport.device,
                BufferGuard([module]),
                self.skips.by_stage,
            ),
            BoundaryExchange(transport),
            self.placement,
            transport.rank,
            self.skips.ends,
            self.reductions.stage_done,
        )
        self.gradients_divided = False
        self._checked = False
        self._keys: dict[Hashable, int] = {}
        self.elapsed = 0.0
        self.busy = 0.0
        self._program = cache(self._lowered)
        self._statistics = Statistics(transport)
        self._drift = BufferSync(module, self.names, transport, lambda name: self._topology.holders(self.owners(name)))
        if deferred_batch_norm and self.synchronous:
            DeferredBatchNorm.convert(module)
        self._connect(probe)
        self.flow = None if self.synchronous else AsynchronousPipeline(self, deferred_batch_norm=deferred_batch_norm)

    # ------------------------------------------------------------------ facts

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank computes losses."""
        return self.transport.rank in self.loss_ranks

    @property
    def loss_process(self) -> int:
        """The process that speaks for this replica: the rank with the last stage of pipe 0."""
        return self._topology.process(self.transport.replica, self.loss_ranks[0])

    @property
    def pipeline_members(self) -> tuple[int, ...]:
        """The processes of this pipeline, sorted."""
        return self._topology.members(self.transport.replica, range(self._topology.ranks))

    @property
    def replica_members(self) -> tuple[int, ...]:
        """The processes with the same rank in all pipelines, sorted."""
        return tuple(sorted(self._topology.replica_processes(self.transport.rank)))

    def schedule(self, micro_batches: int) -> Schedule:
        """The training schedule for a number of micro-batches."""
        schedule = self.family.build(self._topology.ranks, micro_batches, stages=len(self.balance))
        return with_recompute(schedule, self.recompute)

    def holds(self, name: str) -> bool:
        """Whether this rank has the true value of a named parameter or buffer."""
        return self.ownership.holds(name)

    def owners(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that have the true value of a named parameter or buffer."""
        return self.ownership.owners(name)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The pipeline ranks that hold a stage, ascending."""
        return tuple(sorted({rank for (_, held), rank in self.placement.items() if held == stage}))

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters this rank holds, each once."""
        return ((name, p) for name, p in self.module.named_parameters() if self.holds(name))

    # ------------------------------------------------------------------ set-up and end

    def partition(self) -> None:
        """Free the layers of other ranks: their parameters become placeholders in place."""
        self.ownership.release_layers()

    def synchronize(self) -> None:
        """Give all holders of a parameter or buffer the value of the first one of replica 0. Collective."""
        for name, tensor in named_tensors(self.module):
            members = self._topology.holders(self.owners(name))
            if self.holds(name) and len(members) > 1:
                source = self._topology.process(0, self.owners(name)[0])
                data = tensor.detach().contiguous()
                self.transport.broadcast(data, source, members).wait()
                tensor.data.copy_(data)

    def restore(self) -> None:
        """Give every rank the whole module again. Collective over the pipeline.

        What other ranks hold arrives in host memory: the whole module need not fit on one device.
        """

        def fetch(name: str, owners: tuple[int, ...], tensor: Tensor) -> Tensor:
            source = self._topology.process(self.transport.replica, owners[0])
            shape, dtype = self.transport.broadcast_object((tensor.shape, tensor.dtype), source, self.pipeline_members)
            mine = self.transport.process == source
            data = (
                tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                if mine
                else torch.empty(shape, dtype=dtype)
            )
            self.transport.broadcast(data, source, self.pipeline_members).wait()
            return data

        lost = self.agree_on_lost()
        if lost and self.transport.rank == 0:
            warnings.warn(_lost(lost), stacklevel=2)
        self.ownership.restore(fetch, without=lost)
        DeferredBatchNorm.revert(self.module)

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
        topology, transport = self._topology, self.transport
        order = [topology.process(transport.replica, rank) for rank in range(topology.ranks)]

        def gather(mine: Any) -> list[Any]:
            found = dict(
                zip(self.pipeline_members, transport.all_gather_object(mine, self.pipeline_members), strict=True)
            )
            return [found[process] for process in order]

        return self.ownership.agree_on_lost(gather)

    def _connect(self, probe: Schedule) -> None:
        """Prepare all groups and channels, in the same order on all processes."""
        topology = self._topology
        groups = [topology.members(replica, range(topology.ranks)) for replica in range(topology.replicas)]
        groups += [tuple(sorted(topology.replica_processes(rank))) for rank in range(topology.ranks)]
        groups += [self._topology.holders(owners) for owners in self._owner_sets()]
        self.transport.make_groups(list(dict.fromkeys(groups)))
        channels: dict[Channel, None] = {}
        for program in (lower(probe, self.skips.ends), lower(forward_only(probe, 1), self.skips.ends)):
            for rank, actions in enumerate(program):
                for action in actions:
                    if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) and action.peer is not None:
                        direction = "forward" if action.kind is Kind.SEND_FORWARD else "backward"
                        channels[Channel(rank, action.peer, Lane(direction, action.pipe))] = None  # type: ignore[arg-type]
        self.transport.connect(channels)

    def _owner_sets(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(self.owners(name) for name, _ in named_tensors(self.module)))

    # ------------------------------------------------------------------ batches

    def train(
        self,
        step: StepFunction,
        micro_batches: Sequence[Any],
        weights: Sequence[float],
        *,
        seed: int = 0,
        reduce: bool = True,
        check: LossCheck | None = None,
    ) -> dict[int, Any]:
        """Run forward and backward passes of one batch.

        The gradients of this rank's parameters are added to ``parameter.grad``; with ``reduce`` they are summed over
        all holders of each parameter, overlapped with the remaining backward passes.

        Args:
            step: ``step(index, micro_batch)`` runs the user's training step and returns what it returns. It is called
                for every stage of this rank and every micro-batch, and ended by an exception where another stage
                goes on.
            micro_batches: the slices of the batch, the same on all ranks of the pipeline.
            weights: the factor of each micro-batch's loss; they add up to 1 over the batch for a mean.
            seed: the seed of this batch's random streams, the same on all ranks of all pipelines.
            reduce: ``False`` while gradients are still accumulated over batches; `reduce_gradients` later.
            check: looks whether the loss is a mean over samples.

        Returns:
            What the step returned for each micro-batch, detached, on the ranks with the loss; empty elsewhere.
        """
        if self.flow is not None:
            raise ConfigurationError(
                f"Schedule {self.family.name!r} does not finish a batch before the next one.",
                hint="Call advance for every batch and drain in the end.",
            )
        self.gradients_divided = False
        self.reductions.overlapped = reduce
        first, start, busy = not self.ownership.settled, time.perf_counter(), self.executor.busy
        if first:
            self._drift.begin()
        results = self._run(self.batch(step, micro_batches, weights, seed, training=True, check=check))
        if not self.ownership.settled:
            self.agree_on_holders()
            self._drift.agree(lambda name: len(self.owners(name)), len(micro_batches))
            if reduce:
                self.reduce_gradients()
        elif reduce:
            self.reduce_gradients()
        self._commit_statistics(deferred_norms(self.module))
        self._drift.equalise()
        if not first:  # the first batch also agrees on what travels and who holds what
            self.elapsed += time.perf_counter() - start
            self.busy += self.executor.busy - busy
        return results

    def evaluate(self, step: StepFunction, micro_batches: Sequence[Any], *, seed: int = 0) -> dict[int, Any]:
        """Run forward passes alone; see `train`."""
        if self.flow is not None and self.flow.in_flight:
            raise ConfigurationError("Batches are in flight.", hint="Drain the pipeline before an evaluation.")
        results = self._run(self.batch(step, micro_batches, [1.0] * len(micro_batches), seed, training=False))
        self._commit_statistics(norm for norm in deferred_norms(self.module) if norm.training)
        return results

    def returning(self, result: Any) -> None:
        """To be called by steps when they are about to return, within what must know that a run was cut short."""
        run = self.executor.stages.interceptor.run
        if run is not None:
            run.returning(result)

    def advance(
        self,
        step: StepFunction,
        micro_batches: Sequence[Any],
        weights: Sequence[float],
        *,
        seed: int = 0,
        check: LossCheck | None = None,
    ) -> CallResult:
        """Let a schedule without a flush go on by one batch; others stay in flight.

        The gradients that are due are added to ``parameter.grad``, summed over all holders of each parameter. Let the
        optimizer step before the next call if there are any (``CallResult.update``).

        Args:
            step: see `train`; it is called for this batch in later calls, too.
            micro_batches: the slices of the batch, the same on all ranks of the pipeline.
            weights: the factor of each micro-batch's loss.
            seed: the seed of this batch's random streams, the same on all ranks of all pipelines.
            check: looks whether the loss is a mean over samples.

        Raises:
            ConfigurationError: the schedule has a flush, or another number of micro-batches in a batch.
        """
        if self.flow is None:
            raise ConfigurationError(
                f"Schedule {self.family.name!r} finishes every batch before the next one.", hint="Call train."
            )
        return self.flow.advance(self.batch(step, micro_batches, weights, seed, training=True, check=check))

    def drain(self) -> Iterator[CallResult]:
        """Finish what is in flight, one call after the other; the optimizer may have to step after each."""
        return iter(()) if self.flow is None else self.flow.drain()

    def reduce_gradients(self) -> None:
        """Sum ``parameter.grad`` over the holders of each parameter, all at once."""
        self.reductions.finish()

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Note when the actions of this rank compute, for `timeline`."""
        events: list[Event] = []
        self.executor.events = events
        try:
            yield events
        finally:
            self.executor.events = None

    def timeline(self, events: Sequence[Event], title: str | None = None) -> Timeline:
        """The measured timeline of the whole pipeline. Collective over it; right for the ranks of one host."""
        gathered = self.transport.all_gather_object(list(events), self.pipeline_members)
        everything = [event for of_rank in gathered for event in of_rank]
        return Timeline.of(
            everything,
            ranks=self._topology.ranks,
            title=title or self.family.name,
            unit="s",
            global_ranks=self._topology.pipeline_processes(self.transport.replica),
        )

    def _run(self, batch: Batch) -> dict[int, Any]:
        training = batch.training
        program = self._program(len(batch.micro_batches), training)
        with self.running(batch.streams):
            self.executor.run(program, batch)
        if training and not self._checked:
            self.check_called({action.stage for action in program if action.kind is Kind.FORWARD})
        if self.synchronous and training not in self._learnt:
            self._learn_skips(training)
        return batch.results

    def batch(
        self,
        step: StepFunction,
        micro_batches: Sequence[Any],
        weights: Sequence[float],
        seed: int,
        training: bool,
        check: LossCheck | None = None,
    ) -> Batch:
        """What the engine is to know about a batch."""
        if not micro_batches or len(micro_batches) != len(weights):
            raise ConfigurationError(f"{len(micro_batches)} micro-batches came with {len(weights)} weights.")
        mode = (
            training,
            torch.is_grad_enabled(),
            self.module.training,
            torch.is_autocast_enabled(self.transport.device.type),
        )
        # Numbers in the place of signatures: they are looked up for every message.
        keys = [self._keys.setdefault((*mode, signature(part)), len(self._keys)) for part in micro_batches]
        streams = RandomStreams(seed, self.transport.device, self.transport.replica, self._topology.replicas)
        alone = len(micro_batches) == 1 and self.synchronous
        return Batch(step, micro_batches, keys, weights, streams, training, alone, check)

    @contextmanager
    def running(self, streams: RandomStreams) -> Iterator[None]:
        """Around the actions of a batch or call: calls of layers come here, random generators are put back."""
        try:
            with streams.batch(), self.executor.stages.interceptor.installed():
                yield
        except BaseException:
            discard_all(self.module)
            raise

    def _lowered(self, micro_batches: int, training: bool) -> tuple[Action, ...]:
        schedule = self.schedule(micro_batches)
        order = schedule if training else forward_only(schedule, micro_batches)
        return lower(order, self.skips.ends)[self.transport.rank]

    def _learn_skips(self, training: bool) -> None:
        """After the first batch of a kind: let skip connections go straight from now on. Collective."""
        self._learnt.add(training)
        everyone = tuple(range(self._topology.world_size))
        gathered = self.transport.all_gather_object(self.executor.stages.skipped, everyone)
        if self.skips.learn({stage: events for theirs in gathered for stage, events in theirs.items()}):
            self._connect(self.schedule(self._probed))
            self._program.cache_clear()
            self.executor.connect(self.skips.ends)
            self.executor.stages.routes = self.skips.by_stage
            self.executor.courier.forget_plans()

    def check_called(self, stages: set[int]) -> None:
        """Raise if the first training batch has left out layers of the stages that it ran."""
        mine = {number for stage in stages for number in self.stage_layers[stage]}
        missing = sorted(mine - self.executor.stages.called)
        if missing:
            raise PartitionError(
                f"Layer '{self.names[missing[0]]}' was not called in the first training batch "
                f"({len(missing)} of {len(mine)} layers on {self.transport.describe()} were not).",
                hint="Name the layers that the training step calls with layers=... .",
            )
        self._checked = True

    # ------------------------------------------------------------------ reductions

    def agree_on_holders(self) -> None:
        """After the first training batch: agree on who holds the parameters outside the sequence. Collective."""
        self.ownership.settle(uses_of_ranks(self.transport, self.placement, self.ownership.used))
        self.transport.make_groups([self._topology.holders(owners) for owners in sorted(self._owner_sets())])
        self.reductions.settle(self._held(), self.stages_here)

    def _held(self) -> Iterator[HeldParameter]:
        """The parameters of this rank, with the stage that alone uses each."""
        stages: dict[int, set[int]] = {}
        for stage in self.stages_here:
            for number in self.stage_layers[stage]:
                for parameter in self.layers[number][1].parameters():
                    stages.setdefault(id(parameter), set()).add(stage)
        for name, parameter in self.local_parameters():
            owners, of = self.owners(name), stages.get(id(parameter), set())
            alone = len(of) == 1 and self.ownership.in_layers_alone(name) and owners == self.holders(min(of))
            yield HeldParameter(parameter, owners, min(of) if alone else None)

    def _commit_statistics(self, ended: Iterable[DeferredBatchNorm]) -> None:
        """End the mini-batch of those of some deferred batch norms that this rank runs."""
        norms = list(ended)
        names = {id(part): name for name, part in self.module.named_modules()} if norms else {}
        buffers = [(norm, f"{names[id(norm)]}.running_mean".lstrip(".")) for norm in norms]
        self._statistics.commit(
            [(norm, self._topology.holders(self.owners(name))) for norm, name in buffers if self.holds(name)]
        )


def _lost(names: Sequence[str]) -> str:
    return (
        f"No rank has the value of '{names[0]}' ({len(names)} such parameters and buffers): it was changed by those of "
        "several ranks."
    )
