"""``Trainer(strategy="pipe")``: the glue between Lightning and the pipeline. It owns no algorithm."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from os import PathLike
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    ReduceOp,
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipe import schedules
from lightning_pipe.config import Auto, Layout, layout
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.handover import held_back
from lightning_pipe.launcher import ScriptLauncher
from lightning_pipe.metrics import Metrics
from lightning_pipe.micro_batches import LossWeight, MicroBatches, divide_batch
from lightning_pipe.mirror import Mirror
from lightning_pipe.partition import Balance, divide, find_layers
from lightning_pipe.pipeline.failure import FailureBoard
from lightning_pipe.pipeline.rng import Streams, mix
from lightning_pipe.pipeline.runner import Pipeline
from lightning_pipe.pipeline.topology import Topology
from lightning_pipe.pipeline.torch_transport import default_store
from lightning_pipe.pipeline.transport import Transport
from lightning_pipe.pipeline.transports import open_transport
from lightning_pipe.precision import loss_scale, over_stages
from lightning_pipe.refusals import check_copies, check_module, check_optimizers, several_optimizers
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.split import SplitBatch
from lightning_pipe.step import Result, UserStep, join
from lightning_pipe.wire import broadcast

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""As long as Lightning and torch wait. Data preparation on one process counts."""

_NOT_YET = {"recompute": "never", "shard_optimizer": False}


class PipeStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule as a pipeline over several processes.

    The layers are cut into stages, each batch into micro-batches; a schedule drives their forward and backward passes.
    World size = ``pipeline_parallel_size`` x ``data_parallel_size``.

    Args:
        schedule: a registered name, a schedule object, or the path of a CSV file.
        micro_batches: how many a batch is cut into; ``"auto"``: up to four per rank, at least one sample each.
        pipeline_parallel_size: ranks in one pipeline; ``"auto"``: all processes that there are.
        data_parallel_size: pipelines side by side, each with batches of its own; ``"auto"``: 1.
        stages: number of stages; ``"auto"``: ranks x the schedule's stages per rank.
        layers: where the layers are: a dotted path or several in order, with wildcards; ``None`` finds the sequence.
        balance: ``"parameters"``, a list such as ``[2, 3, 2]`` (layers per stage), or a function from a layer to its cost.
        recompute: only ``"never"`` so far.
        deferred_batch_norm: has no effect so far.
        reproducible_rng: random numbers depend on seed, step, micro-batch and layer only, which is always so.
        loss_weight: what the loss of a micro-batch counts, as a function of it; ``None``: its number of samples.
        split_batch: ``split_batch(batch, m)`` returns m micro-batches; ``None``: along dimension 0 of every tensor that
            has the batch's length.
        shard_optimizer: only ``False`` so far.
        save_distributed_checkpoint: ``False``: one ordinary Lightning ``.ckpt``; ``True``: a folder written by all ranks.
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

    def __init__(
        self,
        schedule: str | PathLike[str] | Family | Schedule = "1f1b",
        micro_batches: int | Auto = "auto",
        pipeline_parallel_size: int | Auto = "auto",
        data_parallel_size: int | Auto = "auto",
        stages: int | Auto = "auto",
        layers: str | Sequence[str] | None = None,
        balance: Balance = "parameters",
        recompute: Literal["never", "except_last", "always"] = "never",
        deferred_batch_norm: bool = True,
        reproducible_rng: bool = True,
        loss_weight: LossWeight | None = None,
        split_batch: SplitBatch | None = None,
        shard_optimizer: bool = False,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        for name, value in {"recompute": recompute, "shard_optimizer": shard_optimizer}.items():
            if value != _NOT_YET[name]:
                raise ConfigurationError(
                    f"{name}={value!r} is not supported yet.", hint=f"Use {name}={_NOT_YET[name]!r}."
                )
        self.family = schedules.get(schedule)
        self.num_nodes = 1
        self.layout: Layout | None = None
        self.transport: Transport | None = None
        self.pipeline: Pipeline | None = None
        self._micro_batches, self._loss_weight, self._split_batch = micro_batches, loss_weight, split_batch
        self._sizes = (pipeline_parallel_size, data_parallel_size)
        self._stages, self._layers, self._balance = stages, layers, balance
        self._distributed_checkpoint = save_distributed_checkpoint
        self._backend, self._timeout = process_group_backend, timeout
        self._board: FailureBoard | None = None
        self._replicas: Any | None = None
        self._step: UserStep | None = None
        self._during_run = ExitStack()
        self._seed = 0
        self._evaluated = 0
        self._in_step = False
        self._blocked = False
        self._accumulated = False
        self._names: list[str] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schedule={self.family.name!r}, micro_batches={self._micro_batches!r})"

    # ------------------------------------------------------------------ what the Trainer asks

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are replicas: only then samples are divided and logged values reduced."""
        return self.data_parallel_size > 1

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks in one pipeline."""
        return self._known_layout().pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Pipelines side by side, each with batches of its own."""
        return self._known_layout().data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The number of this process's pipeline."""
        return self._opened().replica

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # ------------------------------------------------------------------ processes

    @override
    def _configure_launcher(self) -> None:
        ScriptLauncher.forget_finished_job()
        assert self.cluster_environment is not None
        self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment the world size and this process's place in it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.transport is None:
            self._open()
        self._share_randomness()
        module = self._module()
        check_module(module, module.trainer, fitting=self._fitting(), ranks=self.pipeline_parallel_size)
        # callbacks that copy the module in their `setup` must find it divided already
        self._divide(late=is_overridden("setup", module) or is_overridden("configure_model", module))

    def _open(self) -> None:
        """Connect the processes."""
        self.set_world_ranks()
        self._check_world()
        assert self.cluster_environment is not None
        chosen = self._known_layout()
        if self.world_size > 1:
            backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
            _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout)
        probe = self.family.build(chosen.pipeline_parallel_size, 1, stages=chosen.stages)
        topology = Topology.for_schedule(
            chosen.pipeline_parallel_size, chosen.data_parallel_size, loss_rank=probe.loss_ranks[0]
        )
        self.transport = open_transport(topology, self.root_device, self._timeout)
        if self.world_size > 1:
            self._board = FailureBoard(default_store(), self.transport)
            self._board.watch()
        if topology.replicas > 1:
            groups = [topology.replica_processes(rank) for rank in range(topology.ranks)]
            made = [dist.new_group(sorted(group), timeout=self._timeout) for group in groups]
            self._replicas = made[self.transport.rank]

    def _known_layout(self) -> Layout:
        if self.layout is None:
            ranks, replicas = self._sizes
            per_rank = self.family.stages_per_rank
            chosen = layout(self.world_size, ranks, replicas, "auto", per_rank)
            stages = self._stages
            if stages == "auto":
                stages = self.family.placed(chosen.pipeline_parallel_size, None)[1]
            self.layout = layout(self.world_size, ranks, replicas, stages, per_rank)
        return self.layout

    def _check_world(self) -> None:
        """Compare what came up with what was asked for."""
        asked = self.num_nodes * self.num_processes
        started = os.environ.get("WORLD_SIZE")
        found = {"the cluster environment": self.world_size}
        if started is not None:
            found["the launcher (WORLD_SIZE)"] = int(started)
        if dist.is_available() and dist.is_initialized():
            found["torch.distributed"] = dist.get_world_size()
        for who, size in found.items():
            if size != asked:
                raise ConfigurationError(
                    f"The Trainer asks for {asked} processes (num_nodes={self.num_nodes} x devices={self.num_processes}), "
                    f"but {who} has {size}.",
                    hint=f"Start {asked} processes, or choose num_nodes and devices so that they multiply to {size}.",
                )

    def _share_randomness(self) -> None:
        """Continue on all processes from the random state of process 0, as one device would."""
        transport = self._opened()
        everyone = tuple(range(transport.topology.world_size))
        state, self._seed = broadcast(transport, (torch.get_rng_state(), torch.initial_seed()), 0, everyone)
        torch.set_rng_state(state)

    # ------------------------------------------------------------------ the module

    def _divide(self, *, late: bool) -> None:
        """Divide the layers over the ranks; layers that are built later are left for a later call."""
        module = self._module()
        try:
            layers = find_layers(module, self._layers)
        except PartitionError:
            if late:
                return
            raise
        balance = divide(module, layers, self._known_layout().stages, self._balance)
        self.pipeline = Pipeline(module, layers, balance, self.family, self._opened())
        self.pipeline.partition()
        self._names = [name for name, _ in module.named_parameters()]

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # on the CPU: the whole module need not fit on one device
        with _EmptyInit(enabled=bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    @override
    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        yield
        if self.pipeline is None:
            self._divide_late(late=True)

    def _divide_late(self, *, late: bool) -> None:
        check_copies(self._module().trainer, self._module())
        self._divide(late=late)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.pipeline is None:
            self._divide_late(late=False)
        elif self._names != [name for name, _ in self._module().named_parameters()]:
            # `setup` or `configure_model` has added modules outside the layers
            self._divide(late=False)
        assert self.model is not None
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        pipeline = self._divided()
        pipeline.synchronize()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
        self._begin(pipeline)

    def _begin(self, pipeline: Pipeline) -> None:
        """Take over, for the duration of a run, what must not stay changed afterwards."""
        module = self._module()
        self._during_run.enter_context(over_stages(self.precision_plugin, pipeline))
        metrics = Metrics(module, self._share, self._replicas)
        metrics.install()
        self._during_run.callback(metrics.remove)
        self._during_run.enter_context(_without_example(module))
        self._step = UserStep(module, pipeline, metrics)
        self._accumulated = False

    def _share(self, value: T) -> T:
        pipeline = self._divided()
        shared: T = broadcast(pipeline.transport, value, pipeline.loss_process, pipeline.pipeline_members)
        return shared

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            raise several_optimizers(error) from error
        check_optimizers(self.optimizers, self.pipeline_parallel_size)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        pipeline = self._divided()
        loader = dataloader.loader if isinstance(dataloader, Mirror) else dataloader
        if self.pipeline_parallel_size == 1:
            return loader
        return Mirror(loader, pipeline.transport, pipeline.loss_process, pipeline.pipeline_members)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # the user's transforms on the device must draw the same numbers on all ranks of a pipeline
        self._evaluated += 1
        streams = Streams(mix(self._seed, 2, self._evaluated, self.data_parallel_rank), self.root_device)
        with streams.batch():
            streams.seed_user_code(0)
            return super().batch_to_device(batch, device, dataloader_idx)

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, pipeline = self._module(), self._divided()
        batch, *rest = args
        cut = divide_batch(
            batch, self.pipeline_parallel_size, self._micro_batches, self._split_batch, self._loss_weight
        )
        scale = loss_scale(self.precision_plugin)
        weights = [weight * scale for weight in cut.weights(self._total(sum(cut.amounts)))]
        seed = mix(self._seed, 0, module.trainer.fit_loop.epoch_loop.total_batch_idx, self.data_parallel_rank)
        together = not self._blocked and not self._accumulated
        self._free_old_gradients()

        def run(step: Callable[[int, Any], Any]) -> dict[int, Any]:
            return pipeline.train(step, cut.parts, weights, seed=seed, reduce=together)

        settled = pipeline.ownership.settled
        with held_back(list(module.parameters()), scale) as held:
            result = self._run("training_step", rest, self.precision_plugin.train_step_context, run, cut)
        self._accumulated = self._accumulated or self._blocked
        if not settled:
            self._drop_foreign_state()
        return self._output(result, cut, held)

    def _output(self, result: Result, cut: MicroBatches, held: Any) -> Any:
        """What the Trainer gets for the batch: the loss, whose backward pass hands over the gradients, and the rest."""
        losses = [_loss(result.outputs[index]) for index in sorted(result.outputs)]
        value = sum(share * float(loss) for share, loss in zip(cut.shares, losses, strict=True))
        loss = held.loss(value, losses[0].dtype, self.root_device)
        first = result.outputs[0]
        if not isinstance(first, Mapping):
            return loss
        outputs = {i: {k: v for k, v in output.items() if k != "loss"} for i, output in result.outputs.items()}
        return {**join(outputs, cut.sizes, cut.shares), "loss": loss}

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, self.precision_plugin.val_step_context)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, self.precision_plugin.test_step_context)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, self.precision_plugin.predict_step_context)

    def _evaluate(self, name: str, args: Sequence[Any], context: Callable[[], AbstractContextManager[None]]) -> Any:
        """Run an evaluation step once over the whole batch: its code sees what it would see on one device."""
        pipeline = self._divided()
        batch, *rest = args
        self._evaluated += 1
        seed = mix(self._seed, 1, self._evaluated, self.data_parallel_rank)

        def run(step: Callable[[int, Any], Any]) -> dict[int, Any]:
            return pipeline.evaluate(step, [batch], seed=seed)

        return self._run(name, rest, context, run, MicroBatches([batch], [1], [1.0])).outputs.get(0)

    def _run(
        self,
        name: str,
        rest: Sequence[Any],
        context: Callable[[], AbstractContextManager[None]],
        run: Callable[[Callable[[int, Any], Any]], dict[int, Any]],
        cut: MicroBatches,
    ) -> Result:
        assert self._step is not None

        def in_step(step: Callable[[int, Any], Any]) -> dict[int, Any]:
            self._in_step = True
            try:
                return run(step)
            finally:
                self._in_step = False

        return self._step.run(name, rest, context, in_step, cut.sizes)

    def _total(self, amount: float) -> float:
        """What the batches of all replicas count together."""
        pipeline = self._divided()
        if len(pipeline.replica_members) == 1:
            return amount
        total = torch.tensor([amount], dtype=torch.float64)
        pipeline.transport.all_reduce(total, pipeline.replica_members).wait()
        return float(total)

    # ------------------------------------------------------------------ gradients

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self._module()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self._accumulated and not self._blocked:
            # over several batches: old and new gradients are reduced together, once
            self._divided().reduce_gradients()
            self._accumulated = False
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        before, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = before

    def _free_old_gradients(self) -> None:
        """Free the gradients that Lightning is about to zero, unless a hook may look at them first."""
        module = self._module()
        trainer = module.trainer
        first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        watched = is_overridden("on_before_zero_grad", module) or is_overridden("optimizer_zero_grad", module)
        watched |= any(is_overridden("on_before_zero_grad", each, pl.Callback) for each in trainer.callbacks)
        if first and not watched:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def _drop_foreign_state(self) -> None:
        """Forget the optimizer states of parameters that the first batch has shown to belong to other ranks."""
        pipeline = self._divided()
        held = {id(parameter) for _, parameter in pipeline.local_parameters()}
        for optimizer in self.optimizers:
            for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in held]:
                del optimizer.state[parameter]

    # ------------------------------------------------------------------ collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.transport is not None and not self._in_step and not self._interrupted():
            self.transport.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self.transport is None or self._in_step or self._interrupted():
            return obj
        everyone = tuple(range(self.transport.topology.world_size))
        shared: T = self.transport.broadcast_object(obj, src, everyone)
        return shared

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce over the replicas; the ranks of a pipeline have the same value already."""
        group = self._replicas if group is None else group
        if group is None or not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, along a new first dimension; with one replica the tensor itself."""
        group = self._replicas if group is None or group is dist.group.WORLD else group
        return tensor if group is None else _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.transport is None or self._interrupted():
            return decision
        # in a step only the ranks of the same stage are sure to ask
        pipeline = self._divided()
        world = tuple(range(self.transport.topology.world_size))
        members = pipeline.replica_members if self._in_step else world
        flag = torch.tensor([int(decision)])
        self.transport.all_reduce(flag, members, "min" if all else "max").wait()
        return bool(flag.item())

    # ------------------------------------------------------------------ end

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._board is not None:
            self._board.fail(exception)

    @override
    def teardown(self) -> None:
        self._during_run.close()
        self._step = None
        if self.pipeline is not None and not self._interrupted():
            self.pipeline.restore()
        self.pipeline = None
        super().teardown()

    # ------------------------------------------------------------------ what must be there

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _opened(self) -> Transport:
        assert self.transport is not None
        return self.transport

    def _divided(self) -> Pipeline:
        if self.pipeline is None:
            raise ConfigurationError(
                "The module is not divided over the ranks yet.", hint="Data and steps are available from `setup` on."
            )
        return self.pipeline

    def _fitting(self) -> bool:
        return self._module().trainer.state.fn == TrainerFn.FITTING

    def _interrupted(self) -> bool:
        """Whether this process is on its way out because of an error: nobody may answer any more."""
        module = self.lightning_module
        return (
            module is not None
            and module._trainer is not None
            and (module.trainer.state.status == TrainerStatus.INTERRUPTED)
        )


@contextmanager
def _without_example(module: pl.LightningModule) -> Generator[None, None, None]:
    """Hide the example input: model summaries and loggers would run the whole module on one rank."""
    example = module._example_input_array
    module._example_input_array = None
    try:
        yield
    finally:
        module._example_input_array = example


def _loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss
