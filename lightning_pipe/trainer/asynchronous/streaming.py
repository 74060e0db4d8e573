"""Training with a schedule without a flush: batches stay in flight between the calls of ``training_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer

from lightning_pipe.engine.asynchronous import AsynchronousPipeline, CallResult
from lightning_pipe.engine.first_batch.loss_check import LossCheck
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.snapshot import Change
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.asynchronous.hyperparameters import Hyperparameters
from lightning_pipe.trainer.asynchronous.training_loop import TrainingLoop
from lightning_pipe.trainer.data.micro_batches import MicroBatches
from lightning_pipe.trainer.signals import Signals
from lightning_pipe.trainer.user_step import BatchResult, StepReport, UserStep, known
from lightning_pipe.trainer.whole_model.logging import Logged
from lightning_pipe.trainer.withheld_gradients import WithheldGradients, withheld_gradients
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.nonblocking_broadcast import NonBlockingBroadcast

Output = Callable[[BatchResult, MicroBatches, WithheldGradients], Any]


@dataclass
class _BatchInFlight:
    """A batch whose losses are not known yet, with what it has logged on this rank."""

    cut: MicroBatches
    check: LossCheck | None
    logged: Logged = field(default_factory=dict)


class Streaming:
    """Drives an asynchronous schedule from Lightning's training loop.

    A call of ``training_step`` lets the schedule go on by one batch and returns the loss of an earlier one: NaN as long
    as none has come out. Its gradients, if a step is due, are those of an earlier batch, too, and the step uses the
    hyperparameters (the learning rate) that this batch would have had on one device. What other ranks must know comes
    from the rank with the loss, which does not wait for them.

    Before the training loop is left (for validation, a checkpoint, the end of an epoch, the end) what is in flight is
    drained: optimizer steps with all of Lightning's hooks around them, and without new batches.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.
        world: the processes.
        step: runs the user's step.
        output: makes what ``training_step`` returns of the results of a batch.
        settled: called once, when it is known who holds which parameter.
        checked: called with the check of a batch when it is over, where the losses are.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        world: World,
        step: UserStep,
        output: Output,
        settled: Callable[[], None],
        checked: Callable[[LossCheck | None], None],
    ) -> None:
        assert pipeline.flow is not None
        self._flow: AsynchronousPipeline = pipeline.flow
        self._module, self._pipeline, self._world, self._step = module, pipeline, world, step
        self._output, self._settled, self._checked = output, settled, checked
        self._trainer: Any = module.trainer
        self._loop = TrainingLoop(module)
        self._channel = NonBlockingBroadcast(pipeline.transport, ahead=self._flow.stream.lag + 2)
        self._hyperparameters = Hyperparameters()
        self._flights: dict[int, _BatchInFlight] = {}
        self._arrived = 0
        self._turn = CallResult()
        self._draining = self._stopping = self._asked = False
        self._changed = ExitStack()

    # ------------------------------------------------------------------ beginning and end

    def begin(self) -> None:
        """Stand where Lightning leaves the training loop, to drain first."""
        fit_loop = self._trainer.fit_loop
        self._around(fit_loop.epoch_loop, "on_advance_end", self._end_batch)
        self._around(fit_loop.epoch_loop.automatic_optimization, "_optimizer_step", self._step_of_batch)
        for owner, name in (
            (fit_loop.epoch_loop.val_loop, "run"),
            (fit_loop, "on_advance_end"),
            (self._trainer._checkpoint_connector, "dump_checkpoint"),
        ):
            self._around(owner, name, self._drain_first)
        for callback in self._trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._around(callback, "_monitor_candidates", partial(self._name_file, callback))
        if self._world.layout.world_size > 1:
            self._replace(fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._tell_of_signal)

    def end(self) -> None:
        """Leave Lightning as it was found. After an error batches may be in flight: they are dropped."""
        self._changed.close()
        if self._flow.in_flight:
            self._flow.drop()

    def _around(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Call ``wrapper(method, ...)`` in the place of a method."""
        self._replace(owner, name, partial(wrapper, getattr(owner, name)))

    def _drain_first(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # after an error nobody may answer any more
        if self._flow.in_flight and self._trainer.state.status != TrainerStatus.INTERRUPTED:
            self.drain()
        return method(*args, **kwargs)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._changed.enter_context(replaced(owner, name, method))

    def _name_file(self, callback: ModelCheckpoint, method: Callable[..., Any], trainer: Any) -> Any:
        """A file is named after the state that is in it: drain before, not when it is written."""
        if callback._should_skip_saving_checkpoint(trainer):
            return method(trainer)
        return self._drain_first(method, trainer)

    def _end_batch(self, method: Callable[[Any], Any], data_fetcher: Any) -> None:
        """In the place of ``on_advance_end``: drain if the training loop is left after the current batch."""
        # a rank that has been asked to stop must not leave the others, which do not know yet
        if self._trainer.should_stop and not self._stopping:
            self._asked, self._trainer.should_stop = True, False
        if self._loop.is_left(data_fetcher, len(self._flights)):
            self._drain_first(method, data_fetcher)
        else:
            method(data_fetcher)

    # ------------------------------------------------------------------ messages

    def share(self, obj: Any, source: int) -> Any:
        """The object of one process of the pipeline, which does not wait for the others."""
        return self._channel.share(obj, source, self._pipeline.pipeline_members)

    def _tell_of_signal(self) -> None:
        """What signals have asked process 0 for: the other processes do not wait for it."""
        signals: Signals = self._trainer.strategy.signals
        asked = list(signals.asked)
        others = self._world.replica_members
        if self._pipeline.transport.process == self._pipeline.loss_process and len(others) > 1:
            asked = self._pipeline.transport.broadcast_object(asked, others[0], others)
        asked = self.share(asked, self._pipeline.loss_process)
        if any(asked):
            # who leaves first would take its messages along
            self._channel.flush()
            self._world.barrier()
            signals.act(asked)

    def _from_loss_ranks(self, part: StepReport | None) -> list[StepReport]:
        topology, replica = self._pipeline.transport.topology, self._pipeline.transport.replica
        return [self.share(part, topology.process(replica, rank)) for rank in self._pipeline.loss_ranks]

    # ------------------------------------------------------------------ calls

    def train(
        self,
        cut: MicroBatches,
        weights: Sequence[float],
        rest: Sequence[Any],
        context: Any,
        seed: int,
        check: LossCheck | None = None,
    ) -> Any:
        """One call with a batch; returns what ``training_step`` is to return.

        Args:
            cut: the batch.
            weights: the factor of each micro-batch's loss.
            rest: the step's arguments after the batch.
            context: entered around each run of the step.
            seed: the seed of the batch's random streams.
            check: looks whether the loss is a mean over samples.
        """
        flight = self._flights[self._arrived] = _BatchInFlight(cut, check)
        self._arrived += 1
        step = self._step.bind("training_step", rest, context, flight.logged)
        return self._call(lambda: self._pipeline.advance(step, cut.parts, weights, seed=seed, check=check))

    def _call(self, run: Callable[[], CallResult]) -> Any:
        settled = self._pipeline.ownership.settled
        with withheld_gradients(list(self._module.parameters())) as held, self._step.running() as before:
            self._turn = turn = run()
        if self._pipeline.ownership.settled and not settled:
            self._settled()
        changes = self._step.changes(before)
        told = [
            self._step.exchange(partial(self._part, batch, changes), self._from_loss_ranks)
            for batch in turn.finished or (None,)
        ]
        self._channel.end_call()
        for parts in told:
            self._step.learn(parts)
        self._step.adopt(told[-1], before)
        self._stop_if(any(part.stop for parts in told for part in parts))
        output = None
        for batch, parts in zip(turn.finished, told, strict=False):
            if batch != turn.finished[0]:
                self._loop.log()
            cut = self._flights.pop(batch).cut
            self._step.replay([part.logged for part in parts], len(cut.parts), own_batch=False)
            if batch == turn.finished[-1]:
                output = self._output(known(parts), cut, held)
        if output is None:
            output = held.loss(float("nan"), torch.get_default_dtype(), self._pipeline.transport.device)
        return output

    def _part(self, batch: int | None, changes: list[Change]) -> StepReport:
        """What a rank with the loss tells the others of a call, or of one of several batches that it has finished."""
        asked, self._asked = self._asked or self._trainer.should_stop, False
        stop = self._world.agree(asked, unanimous=False, members=self._world.replica_members)
        if batch is None:
            return StepReport({}, [], changes, stop)
        flight = self._flights[batch]
        self._checked(flight.check)
        outputs = dict(self._turn.results[batch])
        return self._step.part(outputs, flight.logged, flight.cut.amounts, changes, stop, flight.check)

    def _stop_if(self, agreed: bool) -> None:
        self._stopping = self._trainer.should_stop = agreed

    def _step_of_batch(self, method: Callable[..., None], batch_idx: int, closure: Callable[[], Any]) -> None:
        """In the place of Lightning's optimizer step, with the user's hooks: what they see is the batch that steps."""
        optimizer = self._trainer.optimizers[0]
        if not self._draining:
            self._hyperparameters.note(self._arrived, optimizer)
        due = self._flow.due(arriving=not self._draining)
        with self._hyperparameters.of(due[-1] if due else None, optimizer):
            method(batch_idx, closure)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        """Run the closure, and let the optimizer step if its gradients are due.

        Args:
            optimizer: the optimizer.
            closure: runs ``training_step`` and the backward pass.
            step: lets the optimizer step, with the hooks before it; takes a closure.
        """
        result = closure()
        if self._turn.update:
            step(lambda: result)
        else:
            # a learning rate scheduler would complain that it steps first
            vars(optimizer)["_opt_called"] = True
        self._loop.count_steps(len(self._turn.finished))
        return result

    # ------------------------------------------------------------------ draining

    def drain(self) -> None:
        """Finish what is in flight: one call after the other, with an optimizer step and all hooks."""
        with self._drained():
            self._loop.log_pending()
            turns = self._pipeline.drain()
            calls = 0
            while self._flow.in_flight:
                calls += 1
                self._loop.step(lambda: self._call(lambda: next(turns)))
                if self._turn.finished:
                    self._loop.log(ahead=calls)
            next(turns, None)
            self._channel.flush()
            self._loop.forget_values()
        # here all ranks meet
        self._stop_if(self._world.agree(self._trainer.should_stop or self._asked, unanimous=False))
        self._asked = False

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Around calls without a batch."""
        self._draining = True
        try:
            with self._loop.inside():
                yield
        finally:
            self._draining = False
