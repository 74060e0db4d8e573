"""The processes of a Trainer, arranged in pipelines and replicas: how they come up, meet and fail."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

from lightning_pipe.config import Auto, Layout
from lightning_pipe.errors import CommunicationError, ConfigurationError
from lightning_pipe.launcher import ScriptLauncher, die_with_parent, is_child, leave_quietly
from lightning_pipe.schedules import Family
from lightning_pipe.signals import Signals
from lightning_pipe.world import World, arrange, check_world_size

T = TypeVar("T")


class ProcessStrategy(ParallelStrategy):
    """What a strategy for pipelines answers Lightning about processes. It knows nothing of the module.

    Args:
        family: the schedule.
        sizes: what is asked for: ranks in one pipeline, pipelines side by side, stages.
        backend: of torch.distributed; ``None``: NCCL on GPUs, Gloo on CPUs.
        timeout: the longest that one process waits for another.
        accelerator: set by the Trainer, as are the arguments after it.
        parallel_devices: this node's devices.
        cluster_environment: how the processes find each other.
        checkpoint_io: writes and reads checkpoints.
        precision_plugin: the Trainer's precision.
    """

    def __init__(
        self,
        family: Family,
        sizes: tuple[int | Auto, int | Auto, int | Auto],
        backend: str | None,
        timeout: timedelta,
        accelerator: pl.accelerators.Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.family = family
        self.num_nodes = 1
        self.world: World | None = None
        self._layout: Layout | None = None
        self._asked, self._backend, self._timeout = sizes, backend, timeout
        self._seed = 0
        self._changed = ExitStack()

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
    def layout(self) -> Layout:
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
        return self.connected.transport.replica

    @property
    def connected(self) -> World:
        """The processes, once `setup_environment` has connected them."""
        if self.world is None:
            raise ConfigurationError("The processes are not connected yet.", hint="Ask from `setup` on.")
        return self.world

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # ------------------------------------------------------------------ beginning and failure

    @override
    def _configure_launcher(self) -> None:
        ScriptLauncher.forget_finished_job()
        die_with_parent()
        assert self.cluster_environment is not None
        self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment the world size and this process's place in it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        vars(rank_zero_only)["rank"] = self.global_rank

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world is None:
            assert self.cluster_environment is not None
            self.set_world_ranks()
            asked = self.num_nodes * self.num_processes
            check_world_size(asked, self.num_processes, self.num_nodes, self.cluster_environment)
            self.world = World.open(
                self.layout, self.family, self.root_device, self.cluster_environment, self._backend, self._timeout
            )
            ScriptLauncher.belongs_to_job(self.world)
        self._seed = self.world.share_randomness()
        self.signals = Signals(self._module().trainer, self.world)
        if self.world_size > 1:
            self._changed.enter_context(self.signals.installed())

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.world is None or self.world.board is None:
            return
        self.world.board.fail(exception)
        if isinstance(exception, CommunicationError):
            # it quotes the process that failed: where this one waited says nothing more
            exception.__traceback__, exception.__cause__, exception.__suppress_context__ = None, None, True
        if is_child() and self.world.board.known_to_all():
            leave_quietly(exception)

    @override
    def teardown(self) -> None:
        self._changed.close()
        super().teardown()

    def _interrupted(self) -> bool:
        """Whether this process is on its way out because of an error: nobody may answer any more."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    # ------------------------------------------------------------------ collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.world is not None and not self._interrupted():
            self.world.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj if self.world is None or self._interrupted() else self.world.broadcast(obj, src)

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce over the replicas; the ranks of a pipeline have the same value already."""
        return self.connected.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, along a new first dimension; with one replica the tensor itself."""
        return self.connected.all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.world is None or self._interrupted():
            return decision
        return self.world.agree(decision, unanimous=all)

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
