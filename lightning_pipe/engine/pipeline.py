"""A module over a pipeline at work: training batches, evaluation batches, calls. Knows no trainer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count, pairwise
from typing import Any

import torch
from typing_extensions import override

from lightning_pipe.engine.asynchronous import AsynchronousPipeline
from lightning_pipe.engine.batch import Batch, StepFunction
from lightning_pipe.engine.boundary_exchange import BoundaryExchange
from lightning_pipe.engine.containers import signature
from lightning_pipe.engine.executor import Executor
from lightning_pipe.engine.partitioned_module import PartitionedModule
from lightning_pipe.engine.skip_routes import Routes, ends_of, skip_routes
from lightning_pipe.engine.stage import Stages
from lightning_pipe.engine.streamed_evaluation import StreamedEvaluation
from lightning_pipe.engine.turns import Turns
from lightning_pipe.engine.undivided import run_whole
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.generators import all_draws
from lightning_pipe.intercept.interceptor import Interceptor
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.intercept.tensor_state import counting
from lightning_pipe.parameters.buffer_sync import BufferSync
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm, commit_shared, end_passes
from lightning_pipe.parameters.gradient_sync import GradientSync
from lightning_pipe.schedules import Action, lower
from lightning_pipe.simulate import Event, Timeline
from lightning_pipe.transport.base import Channel, Lane

_SIGNATURES = 4096
"""So many kinds of micro-batches are remembered; of more, such as by a number in each batch, none comes again soon."""


class Pipeline(PartitionedModule):
    """Runs a user's steps over the ranks of a pipeline and its replicas.

    The division is that of `PartitionedModule`, with its arguments; this class adds the batches that run through it.

    Attributes:
        training_executor: that of training batches, which may have several passes; ``executor``: of all others.
        program: what this rank does for a batch of so many micro-batches and passes.
        elapsed, busy: seconds of all training batches but the first, and those in which this rank computed.
        skips: pairs of stages, not neighbours, of which a skip connection goes straight from one to the other.
        reductions: sums the gradients of parameters that other processes hold as well.
        gradients_divided: whether holders of the same parameters have dropped gradients since the last batch.
        asynchronous: runs a schedule that leaves batches in flight between calls; ``None`` for all others.

    Example:
        One process, two stages, three micro-batches::

            transport = SingleProcess()
            pipeline = Pipeline(module, find_layers(module), [2, 2], GPipe(), transport)
            losses = pipeline.train(step, micro_batches, weights=[1 / 3] * 3, seed=0)
    """

    @override
    def __post_init__(self, before: PartitionedModule | None) -> None:
        super().__post_init__(before)
        module, transport = self.module, self.transport
        routes = skip_routes(module, self.layers, self.stage_layers)
        self.skips = ends_of(routes)
        self.reductions = GradientSync(transport)
        self.gradients_divided = False
        self.elapsed = self.busy = 0.0
        self._interceptor = Interceptor(
            module,
            self.layers,
            self.ownership,
            transport.device,
            tells=transport.process == 0,
            places=self.places,
            one_pipe=self.family.pipes == 1,
        )
        self.executor = self._executor(1, routes)
        self.training_executor = self.executor if self.passes == 1 else self._executor(self.passes, {})
        self._signatures = defaultdict[Hashable, int](count().__next__)
        # which calls draw random numbers, in evaluations and in training
        self._draws = [all_draws(transport.device) for _ in range(2)]
        self.program = cache(self._lowered)
        self._buffer_sync = BufferSync(module, self._interceptor.state.around, transport, self.owners)
        if self.deferred_batch_norm and self.synchronous:
            DeferredBatchNorm.convert(module)
        self._connect()
        self._turns = Turns(self)
        self.asynchronous = None if self.synchronous else AsynchronousPipeline(self)

    def _executor(self, passes: int, routes: Routes) -> Executor:
        """Runs the stages of some passes, one pass behind the other. Plans of several passes meet none of one pass."""
        layers, transport = len(self.names), self.transport
        stage_of = [stage for stage, span in enumerate(self.stage_layers) for _ in span]
        spans = [range(n * layers + s.start, n * layers + s.stop) for n in range(passes) for s in self.stage_layers]
        stages = [
            StageLayers(stage, span, self.names * passes, routes.get(stage, {}), stage_of if passes > 1 else ())
            for stage, span in enumerate(spans)
        ]
        return Executor(
            Stages(self._interceptor, stages),
            BoundaryExchange(transport),
            self.sample_schedule(passes).placement,
            self.reductions.stage_done,
            ends_of(routes),
        )

    def _connect(self) -> None:
        """Prepare all groups and channels. Collective: every process does so in the same order, or the first hangs."""
        topology = self.transport.topology
        owner_sets = [*((rank,) for rank in range(topology.ranks)), *self.owner_sets()]
        self.transport.make_groups([topology.holders(owners) for owners in owner_sets])
        ends = [*pairwise(range(self.passes * len(self.balance))), *self.skips]
        channels = list[Channel]()
        placement = self.sample_schedule(self.passes).placement
        for pipe, early, late in ((pipe, *both) for pipe in {pipe for pipe, _ in placement} for both in ends):
            one, other = placement[pipe, early], placement[pipe, late]
            if one != other:
                channels += [Channel(one, other, Lane("forward", pipe)), Channel(other, one, Lane("backward", pipe))]
        self.transport.connect(channels)

    # ------------------------------------------------------------------ batches

    def train(
        self,
        step: StepFunction,
        micro_batches: Sequence[Any],
        weights: Sequence[float],
        *,
        seed: int = 0,
        reduce: bool = True,
    ) -> dict[int, Any]:
        """Run forward and backward passes of one batch.

        The gradients of this rank's parameters are added to ``parameter.grad``; with ``reduce`` they are summed over
        all holders of each parameter, overlapped with the remaining backward passes.

        Args:
            step: ``step(index, micro_batch)`` runs the user's training step and returns what it returns. It is called
                for every stage of this rank and every micro-batch, and ended by an exception where another stage
                goes on.
            micro_batches: the slices of the batch, the same on all ranks of the pipeline.
            weights: the factor of each micro-batch's loss; they add up to 1 over the batch for a mean. A loss that
                counts 0 has no gradients, even if it is NaN.
            seed: the seed of this batch's random streams, the same on all ranks of all pipelines.
            reduce: ``False`` while gradients are still accumulated over batches; `GradientSync.finish` later.

        Returns:
            What the step returned for each micro-batch, detached, on the ranks with the loss; empty elsewhere.
        """
        if self.asynchronous is not None:
            raise ConfigurationError(
                f"Schedule {self.family.name!r} does not finish a batch before the next one.",
                hint="Call `asynchronous.advance` for every batch and `asynchronous.drain` in the end.",
            )
        self.gradients_divided = False
        self.reductions.overlapped = reduce
        # Nothing is reduced while the first batch runs: who holds what outside the layers is known at its end.
        first, start, busy = not self.ownership.users_known, time.perf_counter(), self.training_executor.busy
        self._buffer_sync.begin()
        batch = self.batch(step, micro_batches, seed, weights)
        if (sharded := self.reductions.sharded) is not None:
            batch.using = lambda stage, _: sharded.whole(stage % len(self.stage_layers))
        with nullcontext() if sharded is None else sharded.gathered(len(micro_batches)):
            results = self._run(batch)
        if not self.ownership.users_known:
            self.agree_on_holders()
        # Holders, which are known by now, are the processes that have a tensor in common.
        self._buffer_sync.agree(len(micro_batches))
        # Of later batches most are under way: `GradientSync.stage_done` starts each when its stage is done.
        self.reductions.finish() if reduce else self.reductions.await_further()
        self.commit_statistics()
        self._buffer_sync.equalise()
        if not first:  # that batch also agrees on what travels and who holds what
            self.elapsed += time.perf_counter() - start
            self.busy += self.training_executor.busy - busy
        return results

    @counting()
    def evaluate(
        self, step: StepFunction, parts: Sequence[Any], *, seed: int = 0, turns: bool = False, again: bool = False
    ) -> dict[int, Any] | None:
        """Run forward passes alone; see `train`.

        A step that comes back to layers of an earlier stage ends there and needs ``turns``: this returns ``None``.

        Args:
            step: see `train`.
            parts: the micro-batches.
            seed: the seed of this batch's random streams.
            turns: let the ranks take turns, one computing at a time, so that the step may call layers again.
            again: whether the batch has run in a stream before.
        """
        batch = self.batch(step, parts, seed)
        batch.again = again
        if turns:
            with self.running(batch.streams, caches=True):
                results = self._turns.run(batch)
        else:
            results = run_whole(self, batch) if self.whole else self._run(batch)
        self.commit_statistics(evaluated=True)
        return None if batch.repeats else results

    def returning(self, result: Any) -> None:
        """To be called by steps when they are about to return, within what must know that a run was cut short."""
        if (run := under_way.run) is not None:
            run.returning(result)

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Note when the actions of this rank compute, for `timeline`."""
        events: list[Event] = []
        self.executor.events = self.training_executor.events = events
        try:
            yield events
        finally:
            self.executor.events = self.training_executor.events = None

    def timeline(self, events: Sequence[Event]) -> Timeline:
        """The measured timeline of the whole pipeline. Collective over it; right for the ranks of one host."""
        gathered = self.transport.all_gather_object(list(events), self.pipeline_members)
        return Timeline.of(
            [event for of_rank in gathered for event in of_rank],
            ranks=self.transport.topology.ranks,
            title=self.family.name,
            unit="s",
            global_ranks=self.transport.topology.pipeline_processes(self.transport.replica),
        )

    def _run(self, batch: Batch) -> dict[int, Any]:
        training = batch.training
        program = self.program(len(batch.micro_batches), self.passes if training else 1, training=training)
        executor = self.training_executor if training else self.executor
        self._interceptor.state.begin_batch()
        with self.running(batch.streams):
            executor.run(program, batch)
        return batch.results

    def batch(
        self, step: StepFunction, micro_batches: Sequence[Any], seed: int, weights: Sequence[float] | None = None
    ) -> Batch:
        """The object that goes down to the stages: of a training batch with ``weights``, else of an evaluation."""
        self.ownership.check_data()
        training = weights is not None
        weights = [1.0] * len(micro_batches) if weights is None else weights
        if not micro_batches or len(micro_batches) != len(weights):
            raise ConfigurationError(f"{len(micro_batches)} micro-batches came with {len(weights)} weights.")
        if not training and self.asynchronous is not None and self.asynchronous.in_flight:
            raise ConfigurationError("Batches are in flight.", hint="Drain the pipeline before an evaluation.")
        # What a step does depends on these as well: a plan made in training is none for an evaluation. There the step
        # may change the mode, and batches begin on some ranks before others have done so.
        transport, autocast = self.transport, torch.is_autocast_enabled(self.transport.device.type)
        mode = training, torch.is_grad_enabled(), training and self.module.training, autocast
        # Numbers in the place of signatures: they are looked up for every message.
        known = self._signatures
        if len(known) > _SIGNATURES:  # on all ranks at once, which have the same batches
            known.clear()
            for executor in (self.executor, self.training_executor):
                executor.exchange.forget()
        numbers = [known[(*mode, signature(part))] for part in micro_batches]
        draws = () if transport.shares_generators else self._draws[training]
        streams = RandomStreams(seed, transport.device, transport.replica, transport.topology.replicas, draws)
        undisturbed = len(micro_batches) == 1 and self.synchronous
        return Batch(step, micro_batches, numbers, weights, streams, training, undisturbed)

    @contextmanager
    def running(self, streams: RandomStreams, *, caches: bool = False) -> Iterator[None]:
        """Around the actions of a batch or call: calls of layers come here, random generators are put back.

        Args:
            streams: the batch's random streams.
            caches: whether model caches are of use.
        """
        try:
            with streams.batch(), self._interceptor.installed(caches=caches):
                yield
        except BaseException:
            # What norms have noted of a failed batch must not count in the next one.
            for norm in self.norms:
                norm.pending = {}
            raise
        finally:
            end_passes()

    def _lowered(self, micro_batches: int, passes: int, *, training: bool) -> tuple[Action, ...]:
        """What this rank does for a batch."""
        if training:
            schedule = self.schedule(micro_batches, passes)
            return lower(schedule, self.skips if passes == 1 else ())[self.transport.rank]
        order = StreamedEvaluation(self, self.executor if passes == 1 else self.training_executor)
        actions = order.up_to(order.end_of(micro_batches - 1))
        return tuple(action for action in actions if (action.micro_batch or 0) < micro_batches)

    @override
    def restore(self) -> None:
        super().restore()
        self._interceptor.state.share(lambda own: self.transport.all_gather_object(own, self.pipeline_members))

    # ------------------------------------------------------------------ after the first batch, and after every batch

    def agree_on_holders(self) -> None:
        """After the first training batch: agree on who holds the parameters outside the sequence. Collective."""
        # Of parameters that the replicas divide, the ranks of one pipeline sum parts.
        used, sharded = self.ownership.used, self.reductions.sharded
        topology, stages_of = self.transport.topology, self.sample_schedule().stages_of
        by_stages: defaultdict[tuple[int, ...], set[str]] = defaultdict(set)
        mine = used if sharded is None else sharded.together(used)
        found = self.transport.all_gather_object(mine, topology.same_tensor_rank)
        for process, names in zip(topology.same_tensor_rank, found, strict=True):
            by_stages[stages_of(topology.locate(process)[1])] |= names
        # A rank that has had no micro-batch yet will use what others with the same stages do.
        self.ownership.learn_users([by_stages[stages_of(rank)] for rank in range(topology.ranks)])
        # Groups of processes are made in the same order everywhere, or the library that makes them hangs.
        owner_sets = sorted(self.owner_sets())
        self.transport.make_groups([topology.holders(owners) for owners in owner_sets])
        if sharded is not None:
            sharded.forget(self.holds)
            replicas = range(topology.replicas)
            self.transport.make_groups([topology.members(each, owners) for owners in owner_sets for each in replicas])
        self.reductions.form(self.held_parameters(), self.stages_here)

    def commit_statistics(self, *, evaluated: bool = False) -> None:
        """End a mini-batch of this rank's deferred batch norms: of an evaluation, of those in training mode."""
        held = []
        for norm, name in self.norms.items():
            buffer = f"{name}.running_mean".lstrip(".")
            if (norm.training or not evaluated) and self.holds(buffer):
                held.append((norm, self.transport.topology.holders(self.owners(buffer))))
        commit_shared(held, self.transport)
