"""Training with a schedule without a flush: batches stay in flight between the calls of ``training_step``.

With a pipeline of three ranks a batch finishes two calls after the call that it comes with::

    call                       0     1     2     3     4     drain   drain
    comes with batch           0     1     2     3     4       -       -
    returns the loss of        NaN   NaN   0     1     2       3       4
    steps with gradients of    -     -     0     1     2       3       4
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_pipe.batches.outputs import of_batch
from lightning_pipe.engine.asynchronous import CallResult
from lightning_pipe.engine.withheld_gradients import WithheldGradients, withheld_gradients
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.snapshot import Change, Snapshot
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.asynchronous.hyperparameters import Hyperparameters
from lightning_pipe.trainer.gradients import Gradients
from lightning_pipe.trainer.user_step import StepOfBatch, StepReport, UserStep, known_outputs


class Streaming:
    """Drives an asynchronous schedule from Lightning's training loop.

    A call of ``training_step`` lets the schedule go on by one batch and returns the loss of an earlier batch: NaN until
    the first loss is known. The gradients of a call, if a step is due, are those of an earlier batch, too. The step
    uses the hyperparameters (the learning rate) that this earlier batch would have had on one device. The rank with the
    last stage sends its reports to the other ranks and does not wait for them.

    Before Lightning leaves the training loop (for validation, a checkpoint, the end of an epoch, the end) batches in
    flight are drained: further calls without new batches, each with its optimizer step and all of Lightning's hooks.

    From the beginning methods at which Lightning leaves the training loop, and its optimizer step, are replaced.

    Args:
        step: begins the steps of batches.
        gradients: learns after each call who holds which parameter.
    """

    def __init__(self, step: UserStep, gradients: Gradients) -> None:
        assert step.pipeline.asynchronous is not None
        self._module, self._pipeline, self._asynchronous = step.module, step.pipeline, step.pipeline.asynchronous
        self._step, self._gradients = step, gradients
        self._hyperparameters = Hyperparameters()
        self._in_flight: dict[int, StepOfBatch] = {}
        self._trained: list[bool] = []
        self._batches = 0
        self._call = CallResult()
        self._draining = False
        self._changed = ExitStack()
        self._trainer: Any = self._module.trainer
        self._epoch: Any = self._trainer.fit_loop.epoch_loop
        self._steps = self._epoch.automatic_optimization.optim_progress.optimizer.step
        self._changed.callback(setattr, step.channel, "ahead", step.channel.ahead)
        step.channel.ahead = 2 * (self._asynchronous.stream.lag + 2)  # a call may report two batches
        self._around(self._epoch, "on_advance_end", self._end_batch)
        self._around(self._epoch.automatic_optimization, "_optimizer_step", self._step_of_batch)
        # before an evaluation, the end of an epoch and a checkpoint, what is in flight is finished
        self._around(self._epoch.val_loop, "run", self._drain_first)
        self._around(self._trainer.fit_loop, "on_advance_end", self._drain_first)
        self._around(self._trainer._checkpoint_connector, "dump_checkpoint", self._drain_first)
        for callback in (each for each in self._trainer.callbacks if isinstance(each, ModelCheckpoint)):
            self._around(callback, "_monitor_candidates", partial(self._name_file, callback))

    # ------------------------------------------------------------------ where Lightning leaves the training loop

    def end(self) -> None:
        """Leave Lightning as it was found. After an error batches may be in flight: they are dropped."""
        self._changed.close()
        if self._asynchronous.in_flight:
            self._asynchronous.drop()

    def _around(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let ``wrapper(method, ...)`` be called in the place of a method."""
        self._changed.enter_context(replaced(owner, name, partial(wrapper, getattr(owner, name))))

    def _name_file(self, callback: ModelCheckpoint, method: Callable[..., Any], trainer: Any) -> Any:
        """A file is named after the state that is in it: drain before, not when it is written."""
        if callback._should_skip_saving_checkpoint(trainer):
            return method(trainer)
        return self._drain_first(method, trainer)

    def _drain_first(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # one rank has nothing in flight, but a resumed run has no older version; after an error nobody may answer
        pending = self._asynchronous.in_flight or self._asynchronous.versions.newest
        if pending and self._trainer.state.status != TrainerStatus.INTERRUPTED:
            self.drain()
        return method(*args, **kwargs)

    def _end_batch(self, method: Callable[[Any], Any], data_fetcher: Any) -> Any:
        """In the place of ``on_advance_end``: drain if the training loop is left after the current batch."""
        left = self._run(self._is_left, self._trainer.global_step + len(self._in_flight), data_fetcher)
        return self._drain_first(method, data_fetcher) if left else method(data_fetcher)

    # ------------------------------------------------------------------ calls

    def train(self, step: StepOfBatch, weights: Sequence[float]) -> Any:
        """One call with a batch, whose losses have weights; returns what ``training_step`` is to return."""
        trained = [parameter.requires_grad for parameter in self._module.parameters()]
        if self._in_flight and trained != self._trained:
            raise ConfigurationError(
                "Parameters have been frozen or unfrozen (requires_grad) while earlier batches are in flight.",
                hint="Do so where none is, as in on_train_epoch_start or on_validation_end, or use schedule='1f1b'.",
            )
        self._trained = trained
        run = partial(self._run, step, self._trainer.global_step + len(self._in_flight))
        self._in_flight[self._batches] = step
        self._batches += 1
        parts, seed = step.micro_batches.parts, step.seed
        return self._go_on(lambda: self._asynchronous.advance(run, parts, weights, seed=seed))

    def _run(self, step: Callable[..., Any], steps: int, *args: Any) -> Any:
        """Run a function, which sees as many optimizer steps behind it as on one device."""
        now, self._steps.total.completed = self._steps.total.completed, steps
        try:
            return step(*args)
        finally:
            self._steps.total.completed = now

    def _go_on(self, advance: Callable[[], CallResult]) -> Any:
        """One call, with a batch or while the pipeline is drained; returns what ``training_step`` is to return."""
        stop = self._trainer.should_stop
        with withheld_gradients(list(self._module.parameters())) as withheld, self._step.running() as before:
            self._call = advance()
        if not self._pipeline.is_loss_rank:  # an earlier stage is batches ahead of what counts
            self._trainer.should_stop = stop
        self._gradients.after_batch(self._trainer.optimizers)
        return self._share(before, withheld)

    def _share(self, before: Snapshot | None, withheld: WithheldGradients) -> Any:
        """Share the batches that a call has finished; returns what ``training_step`` is to return.

        Attributes may have been changed by steps of several batches, of which some are still in flight: the changes
        belong to the call, and every report of the call has all of them.
        """
        finished = [*self._call.results]
        reports = self._exchange(self._step.traces.changes(before))
        self._step.traces.adopt([each.changes for each in reports[-1]], before)
        self._step.take_over([report for found in reports for report in found], training=True)
        output, device = None, self._pipeline.transport.device
        for batch, found in zip(finished, reports, strict=False):
            if batch != finished[0]:
                # Lightning logs once after a call
                self._log()
            step = self._in_flight.pop(batch)
            step.replay(found, own_batch=False)
            if batch == finished[-1]:
                output = of_batch(known_outputs(found), step.micro_batches, withheld, device)
        if output is not None:
            return output
        return withheld.loss(float("nan"), torch.get_default_dtype(), device)

    def _exchange(self, changes: list[Change]) -> list[list[StepReport]]:
        """The reports about each batch that the call has finished; about none a call exchanges changes all the same."""
        complete, ranks = self._pipeline.is_loss_rank, self._pipeline.loss_ranks
        batches = self._call.results or (None,)
        return [self._step.exchange(self._report(batch, changes) if complete else None, ranks) for batch in batches]

    def _report(self, batch: int | None, changes: list[Change]) -> StepReport:
        if batch is None:
            return StepReport({}, [], changes, self._step.asked(training=True))
        return self._in_flight[batch].report(dict(self._call.results[batch]), changes)

    def _step_of_batch(self, method: Callable[..., None], batch_idx: int, closure: Callable[[], Any]) -> None:
        """In the place of Lightning's optimizer step, with the user's hooks: what they see is the batch that steps."""
        optimizer = self._trainer.optimizers[0]
        if not self._draining:
            self._hyperparameters.note(self._batches, optimizer)
        due = self._asynchronous.due(arriving=not self._draining)
        if due:
            newest = self._batches - self._draining
            with self._hyperparameters.of(due[-1], optimizer):
                method(batch_idx - (newest - due[-1]), closure)
        else:
            closure()
            # a learning rate scheduler would complain that it steps first
            vars(optimizer)["_opt_called"] = True
        self._steps.increment_by(len(self._call.results) - bool(due))  # Lightning counts one

    # ------------------------------------------------------------------ draining

    def drain(self) -> None:
        """Finish what is in flight: one call after the other, with an optimizer step and all hooks."""
        trainer, epoch, calls, number = self._trainer, self._epoch, self._asynchronous.drain(), 0
        progress = epoch.batch_progress.current
        if self._draining or progress.started > progress.processed:
            raise ConfigurationError(
                "A checkpoint or an evaluation, which ends all batches in flight, begins within the step of a batch.",
                hint="Do it in on_train_batch_end, not in a hook of the optimizer or of the backward pass.",
            )
        without_batch = replaced(trainer.strategy, "training_step", lambda: self._go_on(lambda: next(calls)))
        with self._drained(), without_batch:
            # in a hook at the end of a batch, whose values are due; one that a hook has skipped is not started
            if progress.started == progress.processed > progress.completed:
                self._log()
            self._forget_logged()
            while self._asynchronous.in_flight:
                number += 1
                epoch.automatic_optimization.run(trainer.optimizers[0], progress.started - 1, OrderedDict())
                if self._call.results:
                    self._log(ahead=number)
                # an average takes in every step; after other calls it is asked at the end of their batches
                for callback in (each for each in trainer.callbacks if isinstance(each, WeightAveraging)):
                    callback.on_train_batch_end(trainer, self._module, None, None, epoch.batch_idx)
            # the pipeline puts its versions of the weights together behind the last call
            next(calls, None)
            self._step.channel.flush()
            self._forget_logged()

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Around calls without a batch: Lightning's state is as it is in a training step."""
        stage, hook = self._trainer.state.stage, self._module._current_fx_name
        self._draining = self._trainer.training = True
        try:
            yield
        finally:
            self._draining = False
            self._trainer.state.stage, self._module._current_fx_name = stage, hook

    # ------------------------------------------------------------------ Lightning's loop, by its private methods (2.6)

    def _is_left(self, data_fetcher: Any) -> bool:
        """Whether the training loop is left after the current batch, for an evaluation or for good."""
        stops = self._trainer.should_stop and self._trainer.fit_loop._can_stop_early
        return bool(stops or self._epoch._is_training_done or self._epoch._should_check_val_fx(data_fetcher))

    def _forget_logged(self) -> None:
        """Let calls that log no new values, since no batch comes with them, or out of them, not log the last ones."""
        for value in self._epoch._results.values():
            value._forward_cache = None

    def _log(self, ahead: int = 0) -> None:
        """Log as Lightning does after a call, with the number for loggers of one that is so many calls ``ahead``."""
        connector = self._trainer._logger_connector
        # these properties take over new values
        _ = connector.progress_bar_metrics, connector.callback_metrics
        self._epoch._batches_that_stepped += ahead
        try:
            connector.update_train_step_metrics()
        finally:
            self._epoch._batches_that_stepped -= ahead
