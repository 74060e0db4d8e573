"""Asynchronous schedules: batches stay in flight between calls, each on its version of the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipe.engine.batch import Batch, StepFunction
from lightning_pipe.engine.weight_versions import WeightVersions
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.schedules import stream
from lightning_pipe.torch_internals import NormBase

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline


@dataclass(frozen=True)
class CallResult:
    """What one call has brought about. Batches are numbered in the order in which they came, from 0.

    Args:
        results: for each batch whose losses are known now, the same on all ranks, what the step returned for each
            micro-batch; empty on ranks that have no losses.
        update: the batches whose gradients, averaged, are in ``parameter.grad`` now; empty: no step is due here.
    """

    results: Mapping[int, Mapping[int, Any]] = field(default_factory=dict)
    update: tuple[int, ...] = ()


class AsynchronousPipeline:
    """Runs an asynchronous schedule call by call.

    Every call runs what the schedule's `Stream` says: parts of the batch that comes and of earlier ones. The step
    that is due is the caller's. After `drain` the next batch begins the stream anew: no version is behind.

    Args:
        pipeline: the module over the ranks.

    Attributes:
        stream: what runs in which call.
        versions: the weights.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._rank = pipeline.transport.rank
        self.stream = stream(
            pipeline.family,
            pipeline.transport.topology.ranks,
            len(pipeline.balance),
            skips=pipeline.skips,
            recompute=pipeline.recompute,
        )
        self.versions = WeightVersions(pipeline.module, pipeline.ownership)
        self._in_flight: dict[int, Batch] = {}
        self._calls = self._arrived = self._before = 0
        self._check_batch_norm()

    # ------------------------------------------------------------------ what the caller asks

    @property
    def in_flight(self) -> int:
        """Batches that are not done."""
        return len(self._in_flight)

    def due(self, *, arriving: bool) -> tuple[int, ...]:
        """The batches whose gradients the step at the end of the next call takes; empty: no step is due here.

        Args:
            arriving: whether the next call comes with a batch.
        """
        known = {*self._in_flight, self._arrived} if arriving else {*self._in_flight}
        call = self.stream.call(self._rank, self._calls)
        return tuple(self._serial(batch) for batch in call.update if batch in known)

    def advance(
        self, step: StepFunction, micro_batches: Sequence[Any], weights: Sequence[float], *, seed: int = 0
    ) -> CallResult:
        """Go on by one batch; others stay in flight. See `Pipeline.train` for the arguments.

        The gradients that are due are added to ``parameter.grad``, summed over all holders of each parameter. Let the
        optimizer step before the next call if there are any (``CallResult.update``). The step is called for this batch
        in later calls, too.

        Raises:
            ConfigurationError: the number of micro-batches is another one than the schedule's.
        """
        batch = self._pipeline.batch(step, micro_batches, seed, weights)
        if self._calls != self._arrived:
            raise ConfigurationError(
                "The pipeline is being drained.", hint="Go on until `drain` ends, then begin the next batch."
            )
        size, most = len(batch.micro_batches), self.stream.micro_batches
        if size > most:
            raise ConfigurationError(
                f"A batch has {size} micro-batches; schedule {self._pipeline.family.name!r} is made for {most} in "
                "each, since its optimizer steps as often.",
                hint=f"Use micro_batches={most}.",
            )
        number, self._arrived = self._arrived, self._arrived + 1
        # A batch keeps to the version of the weights that it began with, on this rank, in all later calls.
        version, first = self.stream.version, number * most
        batch.using = lambda _, index: self.versions.using(number, version(self._rank, first + index))
        self._in_flight[number] = batch
        self._pipeline.executor.begin(batch, first)
        return self._call()

    def drain(self) -> Iterator[CallResult]:
        """Calls without a batch until nothing is in flight; the optimizer may have to step after each."""
        while self._in_flight:
            yield self._call()
        if self._calls:
            self._pipeline.executor.advance(())
            self._restart()

    # ------------------------------------------------------------------ one call

    def _call(self) -> CallResult:
        pipeline, call, number = self._pipeline, self.stream.call(self._rank, self._calls), self._calls
        start, busy = time.perf_counter(), pipeline.executor.busy
        known = pipeline.ownership.users_known
        actions = [action for action in call.actions if action.micro_batch in pipeline.executor.batches]
        # done on all ranks, whose receivers come to all of its messages in this call
        done, size = number - self.stream.lag, self.stream.micro_batches
        try:
            # This object only puts the generators back after the call; every batch brings streams of its own.
            streams = RandomStreams(0, pipeline.transport.device)
            self.versions.begin_call()
            with torch.enable_grad(), pipeline.running(streams):
                pipeline.executor.advance(actions, call.again, range(done * size, (done + 1) * size))
        except BaseException:
            self.drop()
            raise
        self._calls += 1
        # By then some rank of each stage has run it, and ranks with the same stages use the same parameters.
        if not known and number >= self.stream.first_update:
            pipeline.agree_on_holders()
            self._check_steps()
        update = tuple(batch for batch in call.update if batch in self._in_flight)
        result = CallResult(
            {self._serial(each): self._in_flight[each].results for each in call.finished if each in self._in_flight},
            tuple(map(self._serial, update)),
        )
        if update:
            self.versions.collect(update)
            pipeline.reductions.finish()
        self.versions.keep(call.oldest, steps=bool(update))
        self._in_flight.pop(done, None)
        if known:  # earlier calls also agree on what travels and who holds what
            pipeline.elapsed += time.perf_counter() - start
            pipeline.busy += pipeline.executor.busy - busy
        return result

    def drop(self) -> None:
        """Give up what is in flight."""
        self._pipeline.executor.abandon()
        self._in_flight.clear()
        self._restart()

    def _restart(self) -> None:
        self.versions.restart()
        self._before += self._arrived
        self._calls = self._arrived = 0

    def _serial(self, number: int) -> int:
        return self._before + number

    # ------------------------------------------------------------------ what cannot be exact

    def _check_steps(self) -> None:
        """Ranks that share a parameter must step for the same batches at the same time."""
        names = {self._pipeline.owners(name): name for name, _ in named_tensors(self._pipeline.module)}
        for owners, name in names.items():
            if len({self.stream.updates(rank) for rank in owners}) > 1:
                raise PartitionError(
                    f"'{name}' is held by {self._pipeline.ownership.holders_in_words(name)}, which schedule "
                    f"{self._pipeline.family.name!r} lets step for different batches.",
                    hint="Replicate their stages equally, or use a schedule with a flush.",
                )

    def _check_batch_norm(self) -> None:
        """Running statistics must not depend on how batches lie in flight, or on which replica they ran."""
        for name, module in self._pipeline.module.named_modules():
            if not isinstance(module, NormBase) or not module.track_running_stats:
                continue
            if self._pipeline.deferred_batch_norm and self.stream.micro_batches > 1:
                raise ConfigurationError(
                    f"'{name}' is to keep the statistics of whole batches, but schedule "
                    f"{self._pipeline.family.name!r} mixes the micro-batches of several batches.",
                    hint="Use deferred_batch_norm=False, which keeps those of micro-batches, or a schedule with a "
                    "flush.",
                )
            if any(len(self._pipeline.holders(stage)) > 1 for stage in range(len(self._pipeline.balance))):
                raise ConfigurationError(
                    f"'{name}' keeps running statistics, which differ on the ranks of a replicated stage.",
                    hint="Use norms without running statistics, or a schedule with a flush.",
                )
