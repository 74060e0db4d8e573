"""Lightning's training loop, as asynchronous schedules use it: also between the loop's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult


class TrainingLoop:
    """The loop's questions and steps, by its private methods (Lightning 2.6).

    Args:
        module: the LightningModule, with its Trainer.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._trainer: Any = module.trainer
        self._epoch: Any = self._trainer.fit_loop.epoch_loop

    def is_left(self, data_fetcher: Any, in_flight: int) -> bool:
        """Whether the loop is left after the current batch, for an evaluation or for good.

        Args:
            data_fetcher: the loop's.
            in_flight: batches that have yet to step.
        """
        trainer = self._trainer
        ends = trainer.max_steps != -1 and trainer.global_step + in_flight >= trainer.max_steps
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        return bool(
            ends or stops or self._epoch._num_ready_batches_reached() or self._epoch._should_check_val_fx(data_fetcher)
        )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Lightning's state as it is in a training step."""
        stage, hook = self._trainer.state.stage, self._module._current_fx_name
        self._trainer.training = True
        try:
            yield
        finally:
            self._trainer.state.stage, self._module._current_fx_name = stage, hook

    # ------------------------------------------------------------------ steps

    def step(self, training_step: Callable[[], Any]) -> None:
        """Let the optimizer step, with a backward pass and all hooks around it, without a batch.

        Args:
            training_step: takes the place of the module's.
        """
        loop, optimizer, index = self._epoch.automatic_optimization, self._trainer.optimizers[0], self._epoch.batch_idx

        def run() -> ClosureResult:
            self._module._current_fx_name = "training_step"
            try:
                return ClosureResult.from_training_step_output(training_step())
            finally:
                self._module._current_fx_name = "optimizer_step"

        closure = Closure(
            step_fn=run,
            backward_fn=loop._make_backward_fn(optimizer),
            zero_grad_fn=loop._make_zero_grad_fn(index, optimizer),
        )
        loop._optimizer_step(index, closure)

    def count_steps(self, batches: int) -> None:
        """Correct the number of steps after a call: Lightning counts one, and the call has finished so many batches."""
        progress = self._epoch.automatic_optimization.optim_progress.optimizer.step
        for tracker in (progress.total, progress.current):
            tracker.ready += batches - 1
            tracker.completed += batches - 1

    # ------------------------------------------------------------------ logged values

    def log(self, ahead: int = 0) -> None:
        """Log the values of a batch, as Lightning does after each call.

        Args:
            ahead: the calls after the current one, of which each has its own number for loggers.
        """
        connector = self._trainer._logger_connector
        # these properties take over new values
        _ = connector.progress_bar_metrics, connector.callback_metrics
        self._epoch._batches_that_stepped += ahead
        try:
            connector.update_train_step_metrics()
        finally:
            self._epoch._batches_that_stepped -= ahead

    def log_pending(self) -> None:
        """In a hook at the end of a batch: log its values, which Lightning has not done yet."""
        progress = self._epoch.batch_progress.current
        if progress.processed > progress.completed:
            self.log()

    def forget_values(self) -> None:
        """No batch comes out of the next calls: the values of the last one must not be logged again."""
        for result in self._epoch._results.values():
            if result.meta.fx == "training_step":
                result._forward_cache = None
