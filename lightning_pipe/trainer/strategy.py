"""``Trainer(strategy="pipe")``: the glue between Lightning and the pipeline. It owns no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipe import schedules
from lightning_pipe.batches.micro_batches import LossWeight
from lightning_pipe.batches.split_batch import SplitBatch
from lightning_pipe.config import Auto, RankOrder, Sharding
from lightning_pipe.construction import initialise_meta
from lightning_pipe.distributions import be_strategy_of_both
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.refusals import check_shapes
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.lightning_internals import optimizers_to_device
from lightning_pipe.partition import Balance, find_layers
from lightning_pipe.partition.calls import CallStore
from lightning_pipe.patches import unheard
from lightning_pipe.profiling.measure import run_conditions
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.trainer import export
from lightning_pipe.trainer.at_rest import GATHER_LIMIT, forget, going_on
from lightning_pipe.trainer.checks import (
    SEVERAL_OPTIMIZERS,
    check_asynchronous,
    check_copies,
    check_module,
    check_optimizers,
    is_about_several_optimizers,
    refusing_old_options,
    warn_of_checkpoints_on_exception,
)
from lightning_pipe.trainer.construction import configured_without_memory, settle, without_memory
from lightning_pipe.trainer.data.batch_splitter import BatchSplitting
from lightning_pipe.trainer.layer_costs import MeasuredShapes
from lightning_pipe.trainer.module_strategy import ModuleStrategy
from lightning_pipe.trainer.report import Report, counts_of
from lightning_pipe.trainer.run import FIRST_STEPS, PipelineRun
from lightning_pipe.trainer.schedule_choice import AUTO, KEY, ScheduleChoice, choose, kept_by, same_everywhere
from lightning_pipe.trainer.stage_division import StageDivision, forget_calls
from lightning_pipe.trainer.whole_model.sharded_optimizer import ShardedOptimizers
from lightning_pipe.trainer.whole_model.synchronized_norms import synchronize_norms

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""As long as Lightning and torch wait: preparing data on one process counts."""


@be_strategy_of_both
class PipeStrategy(ModuleStrategy):
    """Trains an unmodified LightningModule as a pipeline over several processes.

    The layers are cut into stages, each batch into micro-batches; a schedule drives their forward and backward passes.
    World size = ``pipeline_parallel_size`` x ``data_parallel_size``.

    Args:
        schedule: a registered name, a schedule object, the path of a CSV file, or ``"auto"``: the fastest one with a
            flush, as far as the stored profile or the layers' parameters tell.
        micro_batches: how many a batch is cut into; ``"auto"``: up to four per rank, at least one sample each, or 16
            where batch norm is in training.
        pipeline_parallel_size: ranks in one pipeline; ``"auto"``: all processes that there are.
        data_parallel_size: pipelines side by side, each with batches of its own; ``"auto"``: 1.
        rank_order: whose ranks have neighbouring numbers, and so share a node: ``"pipeline"``, those of a pipeline, or
            ``"replicas"``, those that hold the same stages. The plan says what each sends between nodes.
        stages: number of stages; ``"auto"``: ranks x the schedule's stages per rank.
        layers: where the layers are: a dotted path or several in order, with wildcards; ``None`` finds them, if need be
            by what the first batch calls.
        balance: ``"auto"``: the work that the first batch shows, where it shows the layers or these are convolutions,
            else parameters; ``"parameters"``; ``"flops"`` as counted on ``example_input_array``; ``"time"`` or
            ``"memory"`` as measured by ``lightning-pipe profile`` or in the first batch of an earlier run of the same
            module (else it is balanced by flops where there is an example, or by parameters); a list such as
            ``[2, 3, 2]`` (layers per stage), or a function of a layer: its cost.
        recompute: whether stages keep only their input and compute the rest again before their backward pass:
            ``"never"``, ``"always"``, or ``"except_last"`` micro-batch.
        deferred_batch_norm: let batch norm keep the statistics of whole batches rather than of micro-batches.
        loss_weight: what the loss of a micro-batch counts in the batch's mean, as a function of it; ``"sum"``: losses
            are added as they are; ``None``: its number of samples, or of labels that are not -100, as losses show.
        split_batch: ``split_batch(batch, m)`` returns m micro-batches; ``None``: along dimension 0 of every tensor that
            has the batch's length.
        shard_optimizer: ``True``: each of several holders of a parameter (replicas, and the copies of a stage in
            bidirectional schedules) updates a part, and has the optimizer's state of that part alone: ZeRO stage 1.
            ``"gradients"``: each has the summed gradients of its part alone as well: stage 2.
        reduce_dtype: in which gradients are summed over the holders of a parameter: ``"bfloat16"`` halves what is sent,
            and rounds; ``None``: each in its own type.
        save_distributed_checkpoint: ``False``: one ordinary Lightning ``.ckpt``; ``True``: a folder, by all ranks.
        gather_limit: the largest module, in bytes, that every rank gets whole after a run; larger ones stay divided
            until ``trainer.strategy.whole_module()``.
        stream_evaluation: let batches of validation, test and prediction follow each other through the stages.
        evaluation_micro_batches: how many micro-batches a batch of an evaluation is cut into; 1 leaves batches whole.
        passes: how often a training step runs the layers, each pass from the first to the last: 2 for siamese networks.
            Evaluation steps need no such number.
        process_group_backend: of torch.distributed; ``None``: NCCL on GPUs, Gloo on CPUs.
        timeout: the longest that one process waits for another.
        accelerator: set by the Trainer, as are the arguments after it.
        parallel_devices: this node's devices.
        cluster_environment: how the processes find each other.
        checkpoint_io: writes and reads checkpoints.
        precision_plugin: the Trainer's precision.

    Raises:
        ScheduleError: there is no such schedule.
        ConfigurationError: an option has a value that is not supported.

    Example:
        >>> import lightning as L
        >>> L.Trainer(accelerator="cpu", strategy=PipeStrategy(schedule="gpipe"), logger=False).strategy
        PipeStrategy(schedule='gpipe', micro_batches='auto')
    """

    strategy_name = "pipe"

    @refusing_old_options
    def __init__(
        self,
        schedule: str | PathLike[str] | Family | Schedule = "1f1b",
        micro_batches: int | Auto = "auto",
        pipeline_parallel_size: int | Auto = "auto",
        data_parallel_size: int | Auto = "auto",
        stages: int | Auto = "auto",
        layers: str | Sequence[str] | None = None,
        balance: Balance = "auto",
        recompute: Recompute = "never",
        deferred_batch_norm: bool = True,
        loss_weight: LossWeight | None = None,
        split_batch: SplitBatch | None = None,
        shard_optimizer: Sharding = False,
        save_distributed_checkpoint: bool = False,
        gather_limit: int = GATHER_LIMIT,
        stream_evaluation: bool = True,
        evaluation_micro_batches: int = 1,
        passes: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        rank_order: RankOrder = "pipeline",
        reduce_dtype: Literal["bfloat16"] | None = None,
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            schedules.get("1f1b" if schedule == AUTO else schedule),
            (pipeline_parallel_size, data_parallel_size, stages),
            rank_order,
            process_group_backend,
            timeout,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            save_folder=save_distributed_checkpoint,
            shard_optimizer=shard_optimizer,
            gather_limit=gather_limit,
        )
        if reduce_dtype not in (None, "bfloat16"):
            raise ConfigurationError(
                f"reduce_dtype={reduce_dtype!r} is not supported.",
                hint='Use "bfloat16": it has the range of float32, so that sums do not overflow; or None.',
            )
        if shard_optimizer not in (False, True, "gradients"):
            raise ConfigurationError(
                f"shard_optimizer={shard_optimizer!r} is not supported.",
                hint='Use True, which divides the optimizer\'s state, or "gradients", which divides gradients as well.',
            )
        if passes < 1:
            raise ConfigurationError(f"passes={passes}: a training step runs its layers at least once.")
        self._auto = schedule == AUTO
        self._choice: ScheduleChoice | None = None
        if self._auto and passes > 1:
            hint = 'Use "gpipe", "1f1b", "interleaved".'
            raise ConfigurationError('schedule="auto" chooses for one pass.', hint=hint)
        if self._auto and stages != "auto":
            raise ConfigurationError(
                f'schedule="auto" chooses the stages as well, got stages={stages}.', hint="Leave out one of the two."
            )
        if isinstance(micro_batches, int):
            self.family = self.family.for_batches_of(micro_batches)
        self._division = StageDivision(
            layers, balance, self.family, recompute, deferred_batch_norm, micro_batches, passes
        )
        self._splitting = BatchSplitting(
            micro_batches, split_batch, loss_weight, stream_evaluation, evaluation_micro_batches
        )
        self._reduce_dtype = None if reduce_dtype is None else torch.bfloat16
        self._known: tuple[list[str], list[str]] = [], []
        self._calls: CallStore | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schedule={self.family.name!r}, micro_batches={self._splitting.micro_batches!r})"

    # ------------------------------------------------------------------ the module

    @override
    def setup_environment(self) -> None:
        if self._auto and self._choice is None:
            self._choose()
        super().setup_environment()
        if self._choice is not None:
            same_everywhere(self._choice, self.connected.broadcast(self._choice.label, 0))
        module = self._module()
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        check_module(module, module.trainer, fitting=fitting, ranks=self.pipeline_parallel_size)
        self._changed.enter_context(configured_without_memory(module, self._divide_built))
        # callbacks that copy the module in their `setup` must find it divided
        self._divide(later=is_overridden("setup", module) or is_overridden("configure_model", module))

    def _choose(self) -> None:
        """Choose the schedule, or keep that of the checkpoint from which the run resumes."""
        own, ranks = self._division, self.layout.pipeline_parallel_size
        found = kept_by(self._module().trainer, getattr(self._launcher, "checkpoint", None), ranks)
        if found is None:
            place = (self.root_device, self.processes_here)
            found = choose(self._module(), own.layers, ranks, own.micro_batches, *place, own.recompute, own.balance)
        self._choice, self.family, self._layout = found, found.family, None
        self._division = replace(self._division, family=self.family, recompute=found.recompute)
        if self._shard_optimizer != "gradients":  # the most that can be divided
            self._shard_optimizer = found.shard_optimizer or self._shard_optimizer

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._choice is not None:
            checkpoint[KEY] = self._choice.stored(self.layout.pipeline_parallel_size)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _divide_built(self) -> None:
        if self.run is None:
            check_copies(self._module().trainer, self._module())
            self._divide(later=True)

    def _divide(self, *, later: bool, before: Pipeline | None = None) -> None:
        """Divide the layers over the ranks.

        Args:
            later: whether layers may still be missing.
            before: a division that the module has already.
        """
        module, own, layout, world = self._module(), self._division, self.layout, self.connected
        every = self._layer_sync is not None
        self._changed.callback(synchronize_norms(module, self.family, self.root_device, world, every=every))
        step = FIRST_STEPS[module.trainer.state.fn or TrainerFn.FITTING]
        try:
            check_shapes(module)
            if later:  # modules may be missing: what is clear now is so then
                find_layers(module, own.layers)
            self._calls = CallStore(module)
            chosen = own.find(module, layout, world, step, self._calls)
        except PartitionError:
            if later:
                return
            raise
        initialise_meta(module, self._seed)
        of_costs = run_conditions(self.root_device, str(self.precision_plugin.precision))
        if chosen is None:
            division = own.whole(module, layout, world)
        else:
            before = going_on(module, chosen.layers, world.transport, layout.stages) if before is None else before
            division = own.divide(module, chosen, layout, world, of_costs, before)
        pipeline, notes, store, costs, built = division

        pipeline.reductions.reduce_in(self._reduce_dtype)
        pipeline.reductions.scattered = self._shard_optimizer == "gradients"
        forget(module)
        if len(pipeline.pipeline_members) > 1:
            export.divided(module)
        # loading a whole state into a divided module passes by the layers of other ranks
        self._changed.enter_context(unheard(".*copying from a non-meta parameter in the checkpoint to a meta.*"))
        if self.data_parallel_size == 1:  # values are those of the whole batch on all ranks already
            self._changed.enter_context(unheard(".*sync_dist=True.* when logging on epoch level.*"))
        sharded = ShardedOptimizers(pipeline, self.precision_plugin) if self._shard_optimizer else None
        shapes = None
        if self._choice is not None:
            notes, shapes = (*notes, f"schedule chosen: {self._choice.reason}"), self._choice.shapes
        notes = (*notes, *counts_of(self.pipeline_parallel_size, self.processes_here, self.num_processes))
        measured = MeasuredShapes(shapes, None if store is None else store.shapes)
        report = Report(module, pipeline, layout, notes, costs, built, measured, self._shard_optimizer)
        known = chosen is not None and not chosen.guessed
        late = None if known else own.late(module, layout, world, of_costs, pipeline, self._calls)
        self.run = PipelineRun(*(module, pipeline, world, self._splitting, report, store, sharded, self._seed, late))
        self._known = self._division.known(module)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with self.precision_plugin.tensor_init_context(), without_memory(empty=bool(empty_init)):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.pipeline_parallel_size > 1:
            warn_of_checkpoints_on_exception(trainer)
        if self.run is None:
            check_copies(trainer, self._module())
            self._divide(later=False)
        elif self._known != (known := self._division.known(self._module())):
            # `setup` or `configure_model` has added modules outside the layers, or compiled a container of layers
            same = known[1] == self._known[1]
            before = self._division.go_on(self._module(), self.divided.pipeline, self._gather_limit, same=same)
            self._divide(later=False, before=before)
        settle(self._module())
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.divided.pipeline.synchronize()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)
            if self.divided.pipeline.asynchronous is not None:
                micro_batches = self._splitting.micro_batches
                check_asynchronous(trainer, self.divided.pipeline, micro_batches, sharded=self._shard_optimizer)
        self.divided.begin()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if is_about_several_optimizers(error):
                raise SEVERAL_OPTIMIZERS from None
            raise
        check_optimizers(self.optimizers, self.pipeline_parallel_size)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ------------------------------------------------------------------ batches

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        takes_number = is_param_in_hook_signature(self._module().training_step, "batch_idx", min_args=2)
        self.divided.divide("training_step", (batch, batch_idx) if takes_number else (batch,))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self._module()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.divided.gradients.after_backward()  # `on_after_backward` sees gradients that are reduced
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        plain, streaming = super().optimizer_step, self.divided.streaming
        with self.divided.gradients.explained(optimizer):
            if streaming is None:
                return plain(optimizer, closure, model, **kwargs)
            return streaming.optimizer_step(optimizer, closure, lambda own: plain(optimizer, own, model, **kwargs))

    # ------------------------------------------------------------------ end

    @override
    def on_train_end(self) -> None:
        self.divided.report.end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        forget_calls(self._calls, exception)
        super().on_exception(exception)
