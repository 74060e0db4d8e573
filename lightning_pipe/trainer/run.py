"""One run (fit, validate, test or predict): the module divided over the ranks, and its steps driven through them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.config import Auto
from lightning_pipe.engine.containers import signature
from lightning_pipe.engine.first_batch.loss_check import LossCheck
from lightning_pipe.engine.layer_profiler import profiled
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError, PipeError
from lightning_pipe.intercept.interceptor import outside_modules
from lightning_pipe.intercept.random_streams import RandomStreams, mix
from lightning_pipe.parameters.mixing import Mixing
from lightning_pipe.parameters.sync_batchnorm import are_synchronized
from lightning_pipe.partition import ProfileStore
from lightning_pipe.patches import replaced
from lightning_pipe.torch_internals import BatchNorm
from lightning_pipe.trainer.asynchronous.streaming import Streaming
from lightning_pipe.trainer.checks import steps_for_every_batch
from lightning_pipe.trainer.data.joining import join
from lightning_pipe.trainer.data.micro_batches import LossWeight, MicroBatches, divide_batch
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.trainer.data.split_batch import SplitBatch
from lightning_pipe.trainer.data.suspects import Suspects, ambiguous, note, suspicion
from lightning_pipe.trainer.report import Report, no_mean, no_sum, unchecked
from lightning_pipe.trainer.stopping import stopping_together
from lightning_pipe.trainer.user_step import BatchResult, UserStep, from_ranks
from lightning_pipe.trainer.whole_model.finetuning import values_compared
from lightning_pipe.trainer.whole_model.foreign_gradients import ForeignGradients
from lightning_pipe.trainer.whole_model.grad_scaler import loss_scale, over_stages
from lightning_pipe.trainer.whole_model.gradient_norms import over_all_stages
from lightning_pipe.trainer.whole_model.logging import of_values_alone
from lightning_pipe.trainer.whole_model.metrics import Metrics
from lightning_pipe.trainer.whole_model.sharded_optimizer import ShardedOptimizers
from lightning_pipe.trainer.withheld_gradients import WithheldGradients, withheld_gradients
from lightning_pipe.trainer.world import World

Context = Callable[[], AbstractContextManager[None]]

_TRAINING, _EVALUATION, _TRANSFER = range(3)
_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_pipe.")
_CHECKED = frozenset((0, 1, 3, 7, 15, 31))
"""The batches that are checked: in the first ones there may be one class alone, or no padding."""
_TRANSFORMS = ("transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class BatchSplitting:
    """How batches are cut into micro-batches; see `PipeStrategy`."""

    micro_batches: int | Auto = "auto"
    split_batch: SplitBatch | None = None
    loss_weight: LossWeight | None = None


class PipelineRun:
    """A divided LightningModule at work.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.
        world: the processes.
        precision: the Trainer's precision plugin.
        cutting: how batches are cut.
        report: tells the user about the training.
        profiles: where the costs of the layers are to be stored after the first batch; ``None``: they are not measured.
        sharded: divides optimizers over the holders of parameters; ``None``: each holder updates all it holds.
        seed: from which all random streams derive.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        world: World,
        precision: Precision,
        cutting: BatchSplitting,
        report: Report,
        profiles: ProfileStore | None,
        sharded: ShardedOptimizers | None,
        seed: int,
    ) -> None:
        self.pipeline = pipeline
        self.report = report
        self.blocked = False
        self._profiles = profiles
        self.sharded = sharded
        self._module, self._world, self._precision, self._cutting, self._seed = module, world, precision, cutting, seed
        self._ranks = world.layout.pipeline_parallel_size
        self._accumulated = self._told = False
        self._cut_batches = 0
        self._synchronized = are_synchronized(module)
        self._norms = [part for part in module.modules() if isinstance(part, BatchNorm)]
        self._largest = 0
        self._suspects = Suspects()
        self._warned: set[str] = set()
        self._transforms = True
        self._counts = {_EVALUATION: 0, _TRANSFER: 0}
        self._changed = ExitStack()
        self._step: UserStep | None = None
        self.streaming: Streaming | None = None
        self._foreign: ForeignGradients | None = None

    # ------------------------------------------------------------------ beginning and end

    def begin(self) -> None:
        """Take over what must not stay changed when the run is over."""
        self._changed.enter_context(over_stages(self._precision, self.pipeline))
        self._changed.enter_context(over_all_stages(self.pipeline))
        self._changed.enter_context(of_values_alone())
        self._changed.enter_context(values_compared(self.pipeline))
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._watch(self._module.trainer.optimizers)
        metrics = self._metrics()
        metrics.install()
        self._changed.callback(metrics.remove)
        self._changed.enter_context(_without_example(self._module))
        trainer: Any = self._module.trainer
        self.pipeline.ownership.elsewhere = [self._module, *trainer.callbacks]
        self._transforms = any(is_overridden(hook, self._module) for hook in _TRANSFORMS) or (
            trainer.datamodule is not None and any(is_overridden(hook, trainer.datamodule) for hook in _TRANSFORMS)
        )
        summed = self._cutting.loss_weight == "sum"
        self._step = UserStep(self._module, self.pipeline, self._world, metrics, summed=summed)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.pipeline.flow is not None:
            self._begin_streaming(trainer)
        if self._world.layout.world_size > 1:
            together = stopping_together(trainer, self._world, batches=self.streaming is None)
            self._changed.enter_context(together)
            self._meet_before_dumps(trainer)

    def _meet_before_dumps(self, trainer: Any) -> None:
        """A checkpoint begins with what all ranks do together: draining, and gathering an optimizer's shards."""
        connector = trainer._checkpoint_connector
        dump = connector.dump_checkpoint

        def met(*arguments: Any) -> Any:
            trainer.strategy.meet("trainer.save_checkpoint()")
            return dump(*arguments)

        vars(connector)["dump_checkpoint"] = met
        self._changed.callback(vars(connector).pop, "dump_checkpoint", None)

    def _watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Show hooks the gradients of all ranks, and look at what optimizers do with those of this one alone."""
        if self._ranks > 1 and self.pipeline.flow is None:
            self._foreign = ForeignGradients(self.pipeline, optimizers)
            self._changed.callback(self._foreign.remove)
        if self._ranks > 1 or self.sharded is not None:
            names = {id(parameter): name for name, parameter in self._module.named_parameters()}
            for optimizer in optimizers:
                self._changed.callback(Mixing(optimizer, names).remove)

    def _begin_streaming(self, trainer: Any) -> None:
        assert self._step is not None
        if self._profiles is not None and not self._profiles.signatures:
            rank_zero_warn(
                "Layers are measured in the first batch of a schedule with a flush; this run leaves no measurements."
            )
        self.streaming = Streaming(
            self._module,
            self.pipeline,
            self._world,
            self._step,
            self._output,
            lambda: self._drop_foreign_state(trainer.optimizers),
            self._end_check,
        )
        self.streaming.begin()
        self._changed.callback(self.streaming.end)

    def end(self) -> None:
        """Leave everything as it was found; the module stays divided."""
        self._step = None
        self._changed.close()
        self.streaming = self._foreign = None

    def _metrics(self) -> Metrics:
        """The metrics, each with the ranks that update it."""
        pipeline = self.pipeline
        layers = [layer for _, layer in pipeline.layers]
        outside = list(outside_modules(self._module, layers))

        def homes(name: str) -> tuple[int, ...]:
            for stage, numbers in enumerate(pipeline.stage_layers):
                if any(name.startswith(f"{pipeline.names[number]}.") for number in numbers):
                    return pipeline.holders(stage)
            for path, part in outside:
                if name.startswith(f"{path}."):
                    # the ranks that run a module are those that use its parameters
                    held = next((f"{path}.{inner}" for inner, _ in part.named_parameters()), None)
                    return pipeline.owners(held) if held and pipeline.ownership.settled else pipeline.loss_ranks
            return pipeline.loss_ranks

        def gather(value: Any, ranks: tuple[int, ...]) -> list[Any]:
            return from_ranks(pipeline, ranks, value)

        real = [*layers, *(part for _, part in outside)]
        return Metrics(self._module, real, homes, pipeline.transport.rank, gather, self._world.replicas)

    # ------------------------------------------------------------------ data

    def loader(self, dataloader: Any) -> Any:
        """The loader that this rank iterates in the place of the user's."""
        loader = dataloader.loader if isinstance(dataloader, SharedDataLoader) else dataloader
        if self._world.layout.data_parallel_size > 1 and has_iterable_dataset(loader):
            rank_zero_warn(
                "An IterableDataset is not divided over the pipelines. It must do so itself, by "
                "`trainer.strategy.data_parallel_rank` and `trainer.strategy.data_parallel_size`: the ranks of "
                "torch.distributed count processes, of which a pipeline has several."
            )
        if self._ranks == 1:
            return loader
        transport, source, members = self.pipeline.transport, self.pipeline.loss_process, self.pipeline.pipeline_members

        def share(message: Any) -> Any:
            if self.streaming is not None and trainer.training:
                return self.streaming.share(message, source)
            return transport.broadcast_object(message, source, members)

        trainer = self._module.trainer
        mirror = SharedDataLoader(loader, transport, source, members, share)
        if not self._have_equal_length(sized_len(mirror)):
            mirror.compare_with(self._compare_replicas)
        return mirror

    def _have_equal_length(self, length: int | None) -> bool:
        """Whether the data of all replicas is known to be equally long."""
        replicas, members = self._world.layout.data_parallel_size, self._world.replica_members
        if replicas == 1:
            return True
        equal = self._world.sum_over_replicas(length or 0) == replicas * (length or 0)
        return self._world.agree(equal and length is not None, unanimous=True, members=members)

    def _compare_replicas(self, batches: int, ended: bool) -> None:
        """Raise if the data of some replicas has ended and that of others has not: these would wait for ever."""
        trainer: Any = self._module.trainer
        if batches - (not ended) >= _limit(trainer):
            return  # the data is longer than needed; a batch ahead may have been asked for
        members = self._world.replica_members
        if not self._world.agree(ended, unanimous=False, members=members):
            return
        if not self._world.agree(ended, unanimous=True, members=members):
            replica = self._world.transport.replica
            here = f"replica {replica} has {batches} batches" if ended else f"replica {replica} has {batches} or more"
            raise ConfigurationError(
                f"The replicas' datasets differ in length: {here}, others have {'more' if ended else 'fewer'}.",
                hint="Let every replica's IterableDataset end after as many batches, or set limit_train_batches "
                "(limit_val_batches, ...) to the smallest number.",
            )

    @contextmanager
    def transfer(self) -> Generator[None, None, None]:
        """Around the user's transforms on the device, which must draw the same numbers on all ranks of a pipeline."""
        if not self._transforms:
            yield
            return
        streams = RandomStreams(self._next_seed(_TRANSFER), self.pipeline.transport.device)
        with streams.batch():
            streams.seed_user_code(0)
            yield

    # ------------------------------------------------------------------ steps

    def train(self, batch: Any, rest: Sequence[Any], optimizers: Sequence[Optimizer]) -> Any:
        """Forward and backward passes of one batch; returns what the Trainer expects of ``training_step``.

        Args:
            batch: what the loader has yielded, on this device.
            rest: the step's other arguments.
            optimizers: those whose gradients are collected.
        """
        loop = self._module.trainer.fit_loop.epoch_loop
        flow = self.pipeline.flow
        number = self._cutting.micro_batches if flow is None else flow.stream.micro_batches
        cut = self._cut(batch, number)
        scale = loss_scale(self._precision)
        total = self._world.sum_over_replicas(sum(cut.amounts))
        self._check_synchronized(len(cut.parts))
        weights = [weight * scale for weight in cut.weights(total)]
        check = self._loss_check(cut)
        seed = mix(self._seed, _TRAINING, loop.total_batch_idx)
        if self.streaming is not None:
            if self.blocked:
                raise steps_for_every_batch(self.pipeline.family.name, self._module.trainer.accumulate_grad_batches)
            self.report.batch(cut)
            with _noted(batch, cut):
                return self.streaming.train(cut, weights, rest, self._precision.train_step_context, seed, check)
        # over several batches, old and new gradients are reduced together after the last
        reduce = not self.blocked and not self._accumulated
        self._free_old_gradients(optimizers)
        settled = self.pipeline.ownership.settled
        self.report.batch(cut)

        def run(step: Callable[[int, Any], Any]) -> dict[int, Any]:
            with self._measured(cut):
                outputs = self.pipeline.train(step, cut.parts, weights, seed=seed, reduce=reduce, check=check)
            self._end_check(check)
            return outputs

        with withheld_gradients(list(self._module.parameters()), scale) as held, _noted(batch, cut):
            result = self._run("training_step", rest, self._precision.train_step_context, run, cut, check)
        self._accumulated |= self.blocked
        if not settled:
            self._drop_foreign_state(optimizers)
            if self.sharded is not None:
                self.sharded.install(optimizers)
                self._changed.callback(self.sharded.remove)
        return self._output(result, cut, held)

    def _cut(self, batch: Any, number: int | Auto) -> MicroBatches:
        """Cut a batch into micro-batches. All ranks of a pipeline see the same batch, and decide alike.

        Batch norm raises on a micro-batch of one sample with one value per channel, as on one device. A short batch
        that only the cut makes so small is cut into fewer.
        """
        cutting = self._cutting
        norms = not self._synchronized and any(norm.training for norm in self._norms)
        full = self._batch_size or self._largest
        # a number of micro-batches that leaves one sample each in a full batch is the user's choice
        least = 2 if norms and (number == "auto" or full >= 2 * number) else 1
        cut = divide_batch(batch, self._ranks, number, cutting.split_batch, cutting.loss_weight, least)
        length = sum(cut.sizes)
        if len(cut.parts) > 1 and not cut.own:
            self._look_for_suspects(batch, length)
        self._largest = max(self._largest, length)
        if number != "auto" and cutting.split_batch is None and len(cut.parts) < min(number, length):
            self._warn_once(
                "batch norm",
                f"A batch of {length} samples is cut into {len(cut.parts)} micro-batches, not {number}: batch norm "
                "needs at least two samples in each. DataLoader(drop_last=True) leaves out a short last batch.",
            )
        return cut

    def _look_for_suspects(self, batch: Any, length: int) -> None:
        """Raise, or warn, where tensors that have been cut are no samples."""
        trainer: Any = self._module.trainer
        places = self._suspects.look(batch, length, self._batch_size)
        # of a single batch, again and again, other tensors may change by augmentation
        if places and trainer.num_training_batches != 1:
            self._warn_once("suspects", suspicion(places))

    @property
    def _batch_size(self) -> int | None:
        """Samples of a full batch, as far as the training loader tells."""
        loader: Any = self._module.trainer.train_dataloader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 0)
        return size if isinstance(size, int) and size else None

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message)

    def _check_synchronized(self, micro_batches: int) -> None:
        """Norms that wait for the other replicas would do so for ever if these had fewer micro-batches."""
        if not self._synchronized:
            return
        replicas = self._world.layout.data_parallel_size
        equal = self._world.sum_over_replicas(micro_batches) == micro_batches * replicas
        if not self._world.agree(equal, unanimous=True, members=self._world.replica_members):
            raise ConfigurationError(
                f"Synchronized batch norm needs equally many micro-batches on all replicas; this one has "
                f"{micro_batches}, others have more or fewer.",
                hint="Use batches of equal size (drop_last=True), or leave sync_batchnorm out.",
            )

    def _loss_check(self, cut: MicroBatches) -> LossCheck | None:
        """For some of the first batches that are really cut: looks how losses and other numbers of parts join."""
        if len(cut.parts) == 1 or self._step is None:
            return None
        number, self._cut_batches = self._cut_batches, self._cut_batches + 1
        if number not in _CHECKED or self._told:
            return None
        kind = self.pipeline.transport.device.type
        with self._precision.train_step_context():
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        pairs = 3 if number == 0 else 1
        return LossCheck(cut.amounts, cut.sizes, cut.together, autocast, cut.summed, self._step.numbers, pairs)

    def _end_check(self, check: LossCheck | None) -> None:
        """Tell what a check has found, where the losses are."""
        if check is None or self._told or callable(self._cutting.loss_weight):
            return  # who says what a micro-batch counts is not told
        if check.differs is not None:
            self._told = True
            (one, other), expected, both = check.differs
            sizes = [check.sizes[one], check.sizes[other]]
            rank_zero_warn(no_sum(sizes, expected, both) if check.summed else no_mean(sizes, expected, both))
        elif check.reason is not None and not check.agreed:
            self._warn_once("unchecked", unchecked(check.reason, summed=check.summed))

    @contextmanager
    def _measured(self, cut: MicroBatches) -> Generator[None, None, None]:
        """Measure the layers during the first batch, for the next run to be balanced by."""
        store, self._profiles = self._profiles, None
        shape = str(signature(cut.parts[0]))
        if store is None or shape in store.signatures:
            yield
            if store is not None and self._world.transport.process == 0 and shape != store.signatures[-1]:
                store.save(shape)
            return
        with profiled(self.pipeline) as profiler:
            yield
        profile = profiler.gather()
        if self._world.transport.process == 0:
            store.save(shape, profile)
            self._module.print(f"Measured the layers: the next run is balanced by {store.path}")

    def evaluate(self, name: str, batch: Any, rest: Sequence[Any], context: Context) -> Any:
        """An evaluation step, once over the whole batch: its code sees what it would see on one device."""
        seed = self._next_seed(_EVALUATION)

        def run(step: Callable[[int, Any], Any]) -> dict[int, Any]:
            return self.pipeline.evaluate(step, [batch], seed=seed)

        return self._run(name, rest, context, run, MicroBatches([batch], [1], [1.0])).outputs.get(0)

    def after_backward(self) -> None:
        """Reduce what has been accumulated, once it is complete; hooks are to see the gradients of all ranks."""
        if self._accumulated and not self.blocked:
            self.pipeline.reduce_gradients()
            self._accumulated = False
        if self._foreign is not None:
            self._foreign.show()

    def _run(
        self,
        name: str,
        rest: Sequence[Any],
        context: Context,
        run: Callable[[Callable[[int, Any], Any]], dict[int, Any]],
        cut: MicroBatches,
        check: LossCheck | None = None,
    ) -> BatchResult:
        assert self._step is not None
        # what is logged is weighted as the losses are
        return self._step.run(name, rest, context, run, cut.amounts, check)

    def _output(self, result: BatchResult, cut: MicroBatches, held: WithheldGradients) -> Any:
        """The loss, whose backward pass hands over the gradients, with what else the step returned."""
        outputs = [result.outputs[index] for index in sorted(result.outputs)]
        losses = [output["loss"] if isinstance(output, Mapping) else output for output in outputs]
        value = cut.loss([float(loss) for loss in losses])
        loss = held.loss(value, losses[0].dtype, self.pipeline.transport.device)
        if not isinstance(outputs[0], Mapping):
            return loss
        others = {i: {k: v for k, v in output.items() if k != "loss"} for i, output in enumerate(outputs)}
        rules = {} if self._step is None else self._step.rules
        return {**join(others, cut.sizes, cut.shares, rules, self._warn_of_list), "loss": loss}

    def _warn_of_list(self, place: str) -> None:
        """Warn of what hooks get as a list, if there are hooks that may look at it."""
        trainer: Any = self._module.trainer
        users = [one for one in trainer.callbacks if not type(one).__module__.startswith(_LIGHTNING)]
        if is_overridden("on_train_batch_end", self._module) or any(
            is_overridden("on_train_batch_end", one, pl.Callback) for one in users
        ):
            self._warn_once(
                f"list {place}",
                f"training_step returns outputs{place}, of which it is not known how the values of micro-batches make "
                "that of the batch: on_train_batch_end gets a list with one entry for each micro-batch. Known are "
                "tensors and lists with one entry for each sample, means, sums, and what is the same for all.",
            )

    def _next_seed(self, what: int) -> int:
        self._counts[what] += 1
        return mix(self._seed, what, self._counts[what], self._world.transport.replica)

    # ------------------------------------------------------------------ gradients

    def _free_old_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Free the gradients that Lightning is about to zero, unless a hook may look at them first."""
        trainer: Any = self._module.trainer
        first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        hooks = ("on_before_zero_grad", "optimizer_zero_grad")
        watched = any(is_overridden(hook, self._module) for hook in hooks) or any(
            is_overridden("on_before_zero_grad", callback, pl.Callback) for callback in trainer.callbacks
        )
        # a callback that renews batch norm's statistics (SWA) has neither gradients zeroed nor a backward pass run
        if first and not watched and not trainer.fit_loop._skip_backward:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)

    def _drop_foreign_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Forget the optimizer states of parameters that the first batch has shown to belong to other ranks."""
        held = {id(parameter) for _, parameter in self.pipeline.local_parameters()}
        for optimizer in optimizers:
            for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in held]:
                del optimizer.state[parameter]


def _limit(trainer: Any) -> float:
    """The batches that are asked of a loader."""
    if trainer.sanity_checking:
        limit = trainer.num_sanity_val_steps
    elif trainer.validating:
        limit = trainer.limit_val_batches
    elif trainer.testing:
        limit = trainer.limit_test_batches
    else:
        limit = trainer.limit_predict_batches if trainer.predicting else trainer.limit_train_batches
    # a part of a dataset of unknown length is all of it
    return limit if isinstance(limit, int) else float("inf")


@contextmanager
def _noted(batch: Any, cut: MicroBatches) -> Generator[None, None, None]:
    """Add to an error of the step which tensors may have been cut wrongly."""
    try:
        yield
    except Exception as error:
        places = ambiguous(batch, sum(cut.sizes)) if len(cut.parts) > 1 and not cut.own else []
        if places and not isinstance(error, PipeError):
            error.add_note(note(places))
        raise


@contextmanager
def _without_example(module: pl.LightningModule) -> Generator[None, None, None]:
    """Hide the example input: model summaries and loggers would run the whole module on one rank."""
    with replaced(module, "_example_input_array", None):
        yield
