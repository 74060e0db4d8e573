"""``Trainer(strategy="pipe")``: the glue between Lightning and the pipeline. It owns no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipe import schedules
from lightning_pipe.batches.micro_batches import LossWeight
from lightning_pipe.batches.split_batch import SplitBatch
from lightning_pipe.config import Auto, RankOrder, RunLayout, Sharding, check_options
from lightning_pipe.construction import check_all_set, deferred_init
from lightning_pipe.distributions import be_strategy_of_both
from lightning_pipe.engine.first_batch.trial_runs import is_alone
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.whole_gradients import gradient_norm
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.lightning_internals import all_gather_over, optimizers_to_device, reduce_over
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.partition import Balance
from lightning_pipe.patches import replaced
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.sharding.tensor_parallel import Parallelize
from lightning_pipe.trainer import checks
from lightning_pipe.trainer.at_rest import CALL, GATHER_LIMIT, finish_run, gather, resting, size_of
from lightning_pipe.trainer.checkpoints.divided import Checkpoints
from lightning_pipe.trainer.divided_module import DividedModule
from lightning_pipe.trainer.launcher import ScriptLauncher, end_with_parent
from lightning_pipe.trainer.model_sharding import ModelSharding
from lightning_pipe.trainer.run import PipelineRun
from lightning_pipe.trainer.world import World, check_world_size
from lightning_pipe.transport.arrangement import arrange

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""As long as Lightning and torch wait: preparing data on one process counts."""

T = TypeVar("T")


@be_strategy_of_both
class PipeStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule as a pipeline over several processes.

    The layers are cut into stages, each batch into micro-batches; a schedule drives their forward and backward passes.
    World size = ``pipeline_parallel_size`` x ``data_parallel_size`` x ``tensor_parallel_size``.

    Args:
        schedule: a registered name, a schedule object, or the path of a CSV file.
        micro_batches: how many a batch is cut into; ``"auto"``: up to four per rank, at least one sample each, or 16
            where batch norm is in training.
        pipeline_parallel_size: ranks in one pipeline; ``"auto"``: all processes that there are.
        data_parallel_size: pipelines side by side, each with batches of its own; ``"auto"``: 1.
        rank_order: whose ranks have neighbouring numbers, and so share a node: ``"pipeline"``, those of a pipeline, or
            ``"replicas"``, those that hold the same stages. The plan says which ranks are on which node.
        stages: number of stages; ``"auto"``: ranks x the schedule's stages per rank.
        layers: where the layers are: a dotted path or several in order, with wildcards; ``None`` finds them, if need be
            by what the first batch calls.
        balance: ``"auto"``: the work that the first batch shows, where it shows the layers or these are convolutions,
            else parameters; ``"parameters"``; ``"flops"`` as counted on ``example_input_array``; ``"time"`` or
            ``"memory"`` as measured by ``lightning-pipe profile``; a list such as ``[2, 3, 2]`` (layers per stage), or
            a function of a layer: its cost.
        recompute: whether stages keep only their input and compute the rest again before their backward pass:
            ``"never"``, ``"always"``, or ``"except_last"`` micro-batch.
        deferred_batch_norm: let batch norm keep the statistics of whole batches rather than of micro-batches.
        loss_weight: what the loss of a micro-batch counts in the batch's mean, as a function of it; ``"sum"``: losses
            are added as they are; ``None``: its number of samples, or of labels that are not -100, as losses show.
        split_batch: ``split_batch(batch, m)`` returns m micro-batches; ``None``: along dimension 0 of every tensor that
            has the batch's length.
        shard_optimizer: ``True``: each of several holders of a parameter (replicas, and the copies of a stage in
            bidirectional schedules) updates a part, and has the optimizer's state of that part alone: ZeRO stage 1.
            ``"gradients"``: each has the summed gradients of its part alone as well: stage 2. ``"parameters"``: each
            replica has a part of every parameter between batches, by FSDP2: stage 3.
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
        tensor_parallel_size: processes that compute each layer together, neighbours by number.
        parallelize: ``parallelize(layer, mesh)`` divides a layer, or a module outside the layers, over these; ``None``:
            models of Transformers have a plan, other modules do it in ``configure_model``.
        reshard_after_forward: with ``"parameters"``: a stage has whole parameters only while it computes.
        compare_losses: whether the losses of some micro-batches, alone and together, are compared in the first batches;
            ``False``: each counts as it is, also where it compares samples with each other.
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

    @checks.refusing_old_options
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
        tensor_parallel_size: int = 1,
        parallelize: Parallelize | None = None,
        reshard_after_forward: bool = False,
        compare_losses: bool = True,
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        general = micro_batches, layers, balance, loss_weight, split_batch, passes, timeout
        check_options(*general, evaluation_micro_batches, gather_limit, reduce_dtype)
        checks.check_sharding(shard_optimizer, tensor_parallel_size, parallelize)
        self.world, self.num_nodes = World(), 1
        family = schedules.get(schedule)
        self.family = family.for_batches_of(micro_batches) if isinstance(micro_batches, int) else family
        self._asked = pipeline_parallel_size, data_parallel_size, stages, tensor_parallel_size
        self._layout: RunLayout | None = None
        self.micro_batches, self.split_batch = micro_batches, split_batch
        self.loss_weight, self.compare_losses = loss_weight, compare_losses
        self.layers, self.balance, self.passes, self.recompute = layers, balance, passes, recompute
        self.deferred_batch_norm, self.evaluation_micro_batches = deferred_batch_norm, evaluation_micro_batches
        self.stream_evaluation = stream_evaluation and tensor_parallel_size == 1
        self.shard_optimizer, self.reshard_after_forward = shard_optimizer, reshard_after_forward
        self.reduce_dtype = None if reduce_dtype is None else torch.bfloat16
        self.tensor_parallel_size, self.parallelize = tensor_parallel_size, parallelize
        self.sharding = ModelSharding(self)
        self._divided: DividedModule | None = None
        self._save_folder, self._gather_limit = save_distributed_checkpoint, gather_limit
        self.process_group_backend, self.timeout, self.rank_order = process_group_backend, timeout, rank_order
        self._holders: dict[str, tuple[int, ...]] = {}
        self._changed = ExitStack()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schedule={self.family.name!r}, micro_batches={self.micro_batches!r})"

    # ------------------------------------------------------------------ facts

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def processes_here(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def num_processes(self) -> int:
        """Batches side by side, as code asks that divides its batch; Lightning asks in launchers of its own alone."""
        return self.data_parallel_size

    @property
    def is_distributed(self) -> bool:
        """Whether there are replicas: only then samples are divided and logged values reduced."""
        return self.data_parallel_size > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def layout(self) -> RunLayout:
        """The sizes of pipelines and replicas."""
        if self._layout is None:
            self._layout = arrange(self.family, self.world_size, *self._asked)
        return self._layout

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks in one pipeline."""
        return self.layout.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Pipelines side by side, each with batches of its own."""
        return self.layout.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The number of this process's pipeline."""
        return self.world.transport.replica

    @property
    def run(self) -> PipelineRun:
        """The run that is under way, once the module is divided over the ranks."""
        if self._divided is None or self._divided.run is None:
            raise ConfigurationError(
                "The module is not divided over the ranks.", hint="Ask during fit, validate, test."
            )
        return self._divided.run

    @property
    def pipeline(self) -> Pipeline | None:
        """The module over the ranks, during a run, and after it while each rank keeps its share."""
        if self._divided is not None and self._divided.run is not None:
            return self._divided.run.pipeline
        return None if self.lightning_module is None else resting(self.lightning_module)

    # ------------------------------------------------------------------ beginning

    @override
    def _configure_launcher(self) -> None:
        end_with_parent()
        assert self.cluster_environment is not None
        self._launcher = ScriptLauncher(self.cluster_environment, self.processes_here, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment the world size and this process's place in it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.processes_here + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.processes_here)
        # Not by `patches.replaced`: this process keeps its number after the run, and a script that goes on after `fit`
        # must print on process 0 alone. What Lightning (2.6) finds by itself on import is LOCAL_RANK, 0 on each node.
        vars(rank_zero_only)["rank"] = self.global_rank

    @override
    def setup_environment(self) -> None:
        module, environment = self.lightning_module, self.cluster_environment
        assert module is not None
        assert environment is not None
        super().setup_environment()
        trainer, world = module.trainer, self.world
        self.set_world_ranks()
        check_world_size(self.processes_here, self.num_nodes, environment)
        world.begin_run(trainer)
        world.open(self)
        seed = world.share_randomness()
        if self.world_size > 1:
            self._changed.enter_context(world.signals.installed())
        fitting = trainer.state.fn == TrainerFn.FITTING
        checks.check_module(module, trainer, fitting=fitting, ranks=self.pipeline_parallel_size)
        self.sharding.connect(module, world)
        divided = self._divided = DividedModule(module, self, seed, self._changed)
        configured = is_overridden("configure_model", module)
        if configured:
            self._changed.enter_context(divided.configuring())
        # callbacks that copy the module in their `setup` must find it divided
        if not self.sharding.by_module:
            divided.divide(later=configured or is_overridden("setup", module))

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        built = torch.device("meta") if empty_init else deferred_init()
        with self.precision_plugin.tensor_init_context(), built:
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        assert self._divided is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        run = self._divided.complete()
        check_all_set(run.pipeline.module)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.sharding.divide(trainer.lightning_module, run)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)
            if run.pipeline.asynchronous is not None:
                checks.check_asynchronous(trainer, run.pipeline, self.micro_batches, sharded=self.shard_optimizer)
        run.begin()
        if run.late is None:  # a summary or a logger would run the divided module on one rank
            self._changed.enter_context(replaced(type(trainer.lightning_module), "example_input_array", None))

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)  # one: Lightning refuses several, which step in the user's training_step
        checks.check_optimizers(self.optimizers, trainer.lightning_module, self.pipeline_parallel_size)
        self.sharding.prepare(self.optimizers)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ------------------------------------------------------------------ collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.world.meet("trainer.strategy.barrier()"):
            self.world.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        told = self.world.meet("trainer.strategy.broadcast()")
        return self.world.broadcast(obj, src) if told else obj

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce over the replicas; the ranks of a pipeline have the same value already."""
        group = self.world.replicas if group is None else group
        if group is None or not isinstance(tensor, Tensor) or is_alone():
            return tensor
        with self.world.transport.guarding("reduce a value over the replicas"):
            return reduce_over(tensor, group, reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, along a new first dimension; with one replica the tensor itself, as one device."""
        group = self.world.replicas if group is None or group is dist.group.WORLD else group
        if group is None:
            return tensor
        if is_alone():
            return torch.stack([tensor] * self.data_parallel_size)
        with self.world.transport.guarding("gather a value from the replicas"):
            return all_gather_over(tensor, group=group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        told = self.world.meet("trainer.strategy.reduce_boolean_decision()")
        return self.world.agree(decision, unanimous=all) if told else decision

    # ------------------------------------------------------------------ batches

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self.run.loaders.loader(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with self.run.transfer():
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.run.late is not None:  # the first batch has yet to show the layers
            step: Any = self.run.pipeline.module.training_step
            takes_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
            self.run.divide("training_step", (batch, batch_idx) if takes_number else (batch,))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.train(args, self.optimizers)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.run.gradients.after_backward()  # `on_after_backward` sees gradients that are reduced
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self.run.gradients.blocked = True
        try:
            yield
        finally:
            self.run.gradients.blocked = False

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        gradients = self.run.gradients
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        except (RuntimeError, TypeError, AttributeError) as error:
            gradients.explain(error, optimizer)
            raise

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.evaluations.step("validation_step", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.evaluations.step("test_step", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.evaluations.step("predict_step", args)

    def _evaluation_begins(self) -> None:
        self.sharding.hold(True)

    def _evaluation_ends(self) -> None:
        self.sharding.hold(False)

    on_validation_start = on_test_start = on_predict_start = _evaluation_begins
    on_validation_end = on_test_end = on_predict_end = _evaluation_ends

    # ------------------------------------------------------------------ the whole module

    def whole_module(self) -> pl.LightningModule:
        """Give every rank the whole module after a run, in host memory. Collective: call it on all ranks.

        Modules up to ``gather_limit`` are whole already. The next run divides the module again.

        Returns:
            The module that the Trainer has run.

        Raises:
            ConfigurationError: a run is under way, or has ended with an error.
        """
        if self.lightning_module is None:
            raise ConfigurationError(f"{CALL}: the Trainer has had no module yet.", hint="Call it after fit.")
        if self._divided is not None:
            raise ConfigurationError(
                f"{CALL} is called during a run, which needs the module divided.",
                hint="Call it after fit, on all ranks. A checkpoint has the whole module at any time.",
            )
        self.world.meet_to_gather(CALL)
        gather(self.lightning_module)
        return self.lightning_module

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all parameters, on all ranks. Collective: call it on all ranks.

        Each rank has the gradients of its own stages, so functions of torch and Lightning cannot tell.

        Args:
            norm_type: the order of the norm; may be infinity.

        Returns:
            A tensor with one number, on the device of this rank.

        Raises:
            ConfigurationError: a step runs, or no rank has gradients of one batch: with an asynchronous schedule, and
                with ``shard_optimizer=True`` once they are clipped.
        """
        self.world.meet_to_gather("trainer.strategy.grad_norm()")
        return gradient_norm(self.run.pipeline, self.run.pipeline.module.parameters(), norm_type)

    # ------------------------------------------------------------------ checkpoints

    def _checkpoints(self) -> Checkpoints:
        assert self.lightning_module is not None
        return Checkpoints(self.lightning_module, self.pipeline, self.world.transport, self._holders)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        divided = self.shard_optimizer or self.sharding.mesh is not None
        whole = self.pipeline_parallel_size == 1 and not self._save_folder and not divided
        if self.world.interrupted and not whole:
            rank_zero_warn(f"{filepath} was not written: after an error the stages cannot be gathered any more.")
            return
        self.world.meet("trainer.save_checkpoint()", outside_step=True)
        checkpoints = self._checkpoints()
        if self._save_folder:
            with self.sharding.in_parts():  # the optimizers know parameters by their parts
                checkpoints.save_folder(checkpoint, filepath, self.optimizers)
        else:
            checkpoints.save_file(checkpoint, filepath, self.checkpoint_io, storage_options)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._divided is None or self.world.interrupted:
            return super().optimizer_state(optimizer)
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self.run.gradients.state_of(plain)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        return self._checkpoints().load(checkpoint_path, self.checkpoint_io, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints().load_module(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints().load_optimizers(checkpoint, self.optimizers)
        optimizers_to_device(self.optimizers, self.root_device)

    # ------------------------------------------------------------------ end

    @override
    def on_train_end(self) -> None:
        self.world.stop()
        self.run.report.end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.world.fail(exception)

    @override
    def teardown(self) -> None:
        divided, self._divided = self._divided, None
        try:
            if divided is not None and divided.run is not None:
                divided.run.end()
                if not self.world.interrupted:
                    divided.run.gradients.complete_states(self.optimizers)
                    self._leave(divided.run.pipeline)
                DeferredBatchNorm.revert(divided.run.pipeline.module)
        finally:
            self._changed.close()
            with self.sharding.left_behind(self.lightning_module):
                super().teardown()

    def _leave(self, pipeline: Pipeline) -> None:
        """At the end of a run: the module is whole on every rank, or each keeps its share. Collective."""
        module, whole = self.lightning_module, self.sharding.undo(pipeline, self.optimizers)
        assert module is not None
        self._holders = {name: pipeline.owners(name) for name, _ in named_tensors(module)}
        module.cpu()  # as `Strategy.teardown` will do; the whole module may not fit on this device
        small = whole and (size_of(module) <= self._gather_limit or self.pipeline_parallel_size == 1)
        # what layers change in their buffers, other ranks do not see: one of them decides
        finish_run(module, pipeline, whole=self.broadcast(small))
