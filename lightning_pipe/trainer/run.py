"""One run (fit, validate, test or predict): the module divided over the ranks, and its steps driven through them.

`docs/developing.md` draws one training batch: it is split, run, reported, applied, and its loss is returned.

An asynchronous schedule runs other batches than the one that has been split. Each call then reports the batches that it
has finished: `Streaming` in asynchronous/streaming.py does so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipe.batches.batch_splitter import BatchSplitter
from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.batches.outputs import of_batch
from lightning_pipe.engine.undivided import look
from lightning_pipe.engine.withheld_gradients import withheld_gradients
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.random_streams import RandomStreams, mix
from lightning_pipe.partition.calls import Call
from lightning_pipe.patches import replaced
from lightning_pipe.torch_internals import named_parameters
from lightning_pipe.trainer.asynchronous.streaming import Streaming
from lightning_pipe.trainer.checks import steps_for_every_batch
from lightning_pipe.trainer.data.loaders import Loaders
from lightning_pipe.trainer.evaluation.evaluations import Evaluations
from lightning_pipe.trainer.gradients import Gradients
from lightning_pipe.trainer.report import Report
from lightning_pipe.trainer.user_step import StepOfBatch, UserStep
from lightning_pipe.trainer.whole_model.precision import deciding_together, loss_scale

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy

_TRANSFORMS = ("transfer_batch_to_device", "on_after_batch_transfer")
_TRAINING, _EVALUATION, _TRANSFER = range(3)
"""What a stream of random numbers is for."""


class PipelineRun:
    """A divided LightningModule at work.

    Args:
        options: the strategy, which has the user's options and the processes.
        report: tells the user about the training, and has the module over the ranks.
        seed: from which all random streams derive.
        late: divides a module that is whole on all ranks by what its first batch calls; ``None``: it is divided.

    Attributes:
        pipeline: the module over the ranks.
        report: as given; another one once the first batch has shown the layers.
        late: as given; ``None`` once the module is divided.
        gradients: of the training batches.
        loaders: make the loaders that this rank iterates.
        evaluations: run the steps of validation, test and prediction, once over the whole batch; from `begin` on.
        streaming: drives an asynchronous schedule, during ``fit``; ``None`` for all other schedules.
    """

    _step: UserStep  # from `begin` on
    evaluations: Evaluations

    def __init__(
        self,
        options: PipeStrategy,
        report: Report,
        seed: int,
        late: Callable[[list[Call]], Report] | None,
    ) -> None:
        self.report, self.late, self._options = report, late, options
        pipeline = self.pipeline = report.pipeline
        self.gradients = Gradients(pipeline, divides=options.shard_optimizer in (True, "gradients"))
        self.loaders = Loaders(pipeline, options.world)
        self.streaming: Streaming | None = None
        self._module: Any = pipeline.module
        self._splitter = BatchSplitter(
            pipeline,
            options.micro_batches,
            options.split_batch,
            options.loss_weight,
            compare_losses=options.compare_losses,
            full_batch=self.loaders.full_batch,
        )
        self._seed, replica = seed, pipeline.transport.replica
        # one after the other, the same on all ranks of a pipeline
        self._seeds = {use: map(partial(mix, seed, use, replica), count()) for use in (_EVALUATION, _TRANSFER)}
        self._transforms = False  # whether user code changes batches on the device
        self._changed = ExitStack()

    # ------------------------------------------------------------------ beginning and end

    def begin(self) -> None:
        """Take over what must not stay changed when the run is over."""
        trainer: Any = self._module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        owners = [each for each in (self._module, trainer.datamodule) if each is not None]
        self._transforms = any(is_overridden(hook, owner) for hook in _TRANSFORMS for owner in owners)
        self._changed.enter_context(deciding_together(trainer.precision_plugin, self.pipeline))
        if fitting:
            self._changed.callback(self.gradients.end)
            self.gradients.begin(trainer.optimizers)
        self._step = UserStep(self.pipeline, self._options.world, self.loaders.channel)
        self._changed.enter_context(self._step.metrics.installed())
        # hooks of a profiler name parts of layers, and would end what another rank begins
        if (register := getattr(trainer.profiler, "_register", None)) is not None:
            register.__exit__(None, None, None)
        # hooks may keep parameters, or copies of them, in these objects
        self.pipeline.ownership.elsewhere = [self._module, *trainer.callbacks]
        # once for all batches: to put these in place takes as long as a small layer
        self._changed.enter_context(self._step.log.installed())
        self._changed.enter_context(self.pipeline.executor.stages.interceptor.torch_patched())
        self._changed.enter_context(self._step.traces.hooks.installed())
        self.evaluations = Evaluations(self._step, self._seeds[_EVALUATION], self._options, self.divide)
        self._changed.enter_context(self.evaluations.installed())
        if fitting and self.pipeline.asynchronous is not None:
            self.streaming = Streaming(self._step, self.gradients)
            self._changed.callback(self.streaming.end)
        if fitting:  # before what is in flight is drained
            stop = partial(self._stop_together, trainer, trainer.fit_loop.epoch_loop.on_advance_end)
            self._changed.enter_context(replaced(trainer.fit_loop.epoch_loop, "on_advance_end", stop, gated=False))
        if self._options.world.layout.world_size > 1:
            self._meet_before_dumps(trainer)

    @staticmethod
    def _stop_together(trainer: Any, method: Callable[..., None], *arguments: Any) -> None:
        """In the place of ``on_advance_end``, behind which a Trainer that is to stop goes to validation, or leaves."""
        if trainer.should_stop:
            trainer.strategy.world.stop()
        method(*arguments)

    def _meet_before_dumps(self, trainer: Any) -> None:
        """A checkpoint begins with what all ranks do together: draining, and gathering an optimizer's shards."""
        connector = trainer._checkpoint_connector
        dump = connector.dump_checkpoint

        def met(*arguments: Any) -> Any:
            # within a step, the interception would take the state's tensors for the step's own
            trainer.strategy.world.meet("trainer.save_checkpoint()", outside_step=True)
            with trainer.strategy.sharding.in_parts():
                return dump(*arguments)

        self._changed.enter_context(replaced(connector, "dump_checkpoint", met, gated=False))

    def end(self) -> None:
        """Leave everything as it was found; the module stays divided."""
        self._changed.close()

    # ------------------------------------------------------------------ batches

    def divide(self, name: str, args: Sequence[Any]) -> Evaluations:
        """Before the first batch: divide a module that is whole by what its step calls. Collective over all processes.

        Args:
            name: the method of the LightningModule.
            args: its arguments; the first one is the batch, on this device.

        Returns:
            The evaluations of the module as it is divided.

        Raises:
            PartitionError: it calls fewer layers than there are stages.
            Exception: what the step raises.
        """
        late, self.late = self.late, None
        assert late is not None
        report = late(self._options.world.broadcast(self._look(name, args), 0))
        self.end()
        report.notes = self.report.notes + report.notes
        self.report = report
        self.begin()
        return self.evaluations

    def _look(self, name: str, args: Sequence[Any]) -> list[Call]:
        """What a step calls, on process 0."""
        batch, seed = args[0], mix(self._seed, _TRAINING, 0)
        parts = MicroBatches([batch], [1], [1.0])
        with suppress(ConfigurationError):  # how to cut it is not clear: the batch itself will say so
            parts = self._splitter.split(batch) if name == "training_step" else parts
        if self.pipeline.transport.process > 0:
            return []
        with self._step.running():
            step = StepOfBatch(self._step, name, args, parts, seed)
            return look(self.pipeline, step, parts.parts[0], training=name == "training_step", seed=seed)

    def train(self, args: Sequence[Any], optimizers: Sequence[Optimizer]) -> Any:
        """Forward and backward passes of one batch; returns what the Trainer expects of ``training_step``.

        Args:
            args: the step's arguments; the first one is the batch, on this device.
            optimizers: those whose gradients are collected.
        """
        trainer: Any = self._module.trainer
        scale = loss_scale(trainer.precision_plugin)  # once: a look at it waits for the device
        step, weights = self._split(args, scale)
        if self.streaming is not None:
            return self.streaming.train(step, weights)
        self.gradients.free_old(optimizers)
        parts, reduce = step.micro_batches, self.gradients.reduced_at_once
        with withheld_gradients([each for _, each in named_parameters(self._module)], scale) as withheld:
            with self._step.running() as step.before:
                step.outputs = self.pipeline.train(step, parts.parts, weights, seed=step.seed, reduce=reduce)
            # report what the last stage has made of the batch, and apply it on all ranks
            outputs = step.share() or {}
        self.gradients.after_batch(optimizers)
        return of_batch(outputs, parts, withheld, self.pipeline.transport.device)

    def _split(self, args: Sequence[Any], scale: float) -> tuple[StepOfBatch, list[float]]:
        """The step of a batch that is cut into micro-batches, and the factors of their losses, scaled."""
        trainer: Any = self._module.trainer
        if self.streaming is not None and self.gradients.blocked:
            raise steps_for_every_batch(self.pipeline.family.name, trainer.accumulate_grad_batches)
        seed = mix(self._seed, _TRAINING, trainer.fit_loop.epoch_loop.total_batch_idx)
        parts = self._splitter.split(args[0])
        if (number := self._splitter.due(parts)) is not None:
            with self._step.running():
                step = StepOfBatch(self._step, "training_step", args, parts, seed)
                parts = self._splitter.looked_at(parts, step, seed, number)
        weights = [weight * scale for weight in self._splitter.weights(parts)]
        self.report.batch(parts, chosen=self._splitter.number == "auto")
        return StepOfBatch(self._step, "training_step", args, parts, seed), weights

    @contextmanager
    def transfer(self) -> Generator[None, None, None]:
        """Around the user's transforms on the device, which must draw the same numbers on all ranks of a pipeline."""
        if not self._transforms:
            yield
            return
        streams = RandomStreams(next(self._seeds[_TRANSFER]), self.pipeline.transport.device)
        with streams.batch():
            streams.seed_user_code(0)
            yield
