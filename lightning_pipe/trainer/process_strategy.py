"""The processes of a Trainer, arranged in pipelines and replicas: how they come up, meet and fail."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

from lightning_pipe.config import Auto, RankOrder, RunLayout
from lightning_pipe.distributions import maker, of_maker
from lightning_pipe.errors import CommunicationError, ConfigurationError
from lightning_pipe.schedules import Family
from lightning_pipe.trainer.children import end_with_parent
from lightning_pipe.trainer.launcher import ScriptLauncher, check_interactive
from lightning_pipe.trainer.meeting import Meetings
from lightning_pipe.trainer.signals import ENDINGS, Signals
from lightning_pipe.trainer.world import World, check_world_size
from lightning_pipe.transport.arrangement import arrange
from lightning_pipe.transport.failures import joined_threads
from lightning_pipe.transport.topology import check_rank_order

T = TypeVar("T")


class ProcessStrategy(ParallelStrategy):
    """What a strategy for pipelines answers Lightning about processes. It knows nothing of the module.

    Args:
        family: the schedule.
        sizes: what is asked for: ranks in one pipeline, pipelines side by side, stages.
        rank_order: whose processes have neighbouring numbers.
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
        rank_order: RankOrder,
        backend: str | None,
        timeout: timedelta,
        accelerator: pl.accelerators.Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if not isinstance(timeout, timedelta):
            raise ConfigurationError(
                f"timeout={timeout!r} has no unit.", hint="Write PipeStrategy(timeout=datetime.timedelta(seconds=…))."
            )
        self.family = family
        self.num_nodes = 1
        self.world: World | None = None
        self.signals: Signals | None = None
        self._meetings: Meetings | None = None
        self._layout: RunLayout | None = None
        self._asked, self._backend, self._timeout = sizes, backend, timeout
        self._seed, self._rank_order = 0, check_rank_order(rank_order)
        self._changed = ExitStack()

    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Keep the arguments, for the same strategy of Lightning's other distribution."""
        made = super().__new__(cls)
        made._given = args, options
        return made

    # ------------------------------------------------------------------ what the Trainer asks

    def _set_accelerator(self, accelerator: pl.accelerators.Accelerator) -> None:
        """The first thing that a Trainer sets: this becomes a strategy of the Trainer's distribution of Lightning."""
        if maker(accelerator) not in (None, maker(self)):
            kind = of_maker(type(self), accelerator)
            args, options = self._given
            vars(self).clear()
            self.__class__ = kind
            self.__init__(*args, **options)  # type: ignore[misc]
        self._accelerator = accelerator

    accelerator = property(ParallelStrategy.accelerator.fget, _set_accelerator)  # type: ignore[attr-defined]

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def processes_here(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def num_processes(self) -> int:
        """Batches side by side, as code asks that divides its batch; Lightning asks in launchers of its own alone."""
        return self.data_parallel_size

    @property
    def is_distributed(self) -> bool:
        """Whether there are replicas: only then samples are divided and logged values reduced."""
        return self.data_parallel_size > 1

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
        end_with_parent()
        assert self.cluster_environment is not None
        check_interactive(self.processes_here * self.num_nodes, self.cluster_environment)
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
        super().setup_environment()
        self._check_not_failed()
        if self.world is None:
            assert self.cluster_environment is not None
            self.set_world_ranks()
            asked = self.num_nodes * self.processes_here
            check_world_size(asked, self.processes_here, self.num_nodes, self.cluster_environment)
            self.world = World.open(
                self.layout,
                self.family,
                self.root_device,
                self.cluster_environment,
                self._backend,
                self._timeout,
                self.num_nodes,
                self._rank_order,
            )
            if self.world.board is not None:
                self._meetings = Meetings(self.world.board, self._child_has_ended)
        self._seed = self.world.share_randomness()
        self.signals = Signals(self._module().trainer, self.world)
        if self.world_size > 1:
            self._changed.enter_context(self.signals.installed())

    def _check_not_failed(self) -> None:
        """An error has ended the connections of this Trainer's processes: nobody may wait for the others again."""
        board = None if self.world is None else self.world.board
        if board is not None and board.failed:
            name, reason = self.connected.transport.describe(), "" if board.failure is None else f" {board.failure}"
            raise CommunicationError(
                f"{name[0].upper()}{name[1:]} cannot run this Trainer again: its last run has failed, and the "
                f"connections between its processes have ended.{reason}",
                hint="To go on behind an error that your code catches, catch it on all processes (those without the "
                "error of their own get a CommunicationError), and let all build another Trainer, with another "
                "PipeStrategy. The module may be the same.",
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.signals is not None:
            self.signals.leaving_together = False  # the hooks of callbacks have been called, and processes leave now
        board = None if self.world is None else self.world.board
        if isinstance(exception, SIGTERMException) and exception.code is None:
            # Lightning (2.6) ends with code 0 and without a word, as after a run that has finished
            exception.code = 128 + signal.SIGTERM
            if self.global_rank == 0:
                reason = "it was asked to by SIGTERM." if board is None or board.failure is None else board.failure
                joined_threads.tell(f"{self._where()} The run ends: {reason}")
        joined_threads.note_failure(exception)
        if board is not None:
            board.fail(
                exception, next((kind for kind, told in ENDINGS.items() if isinstance(exception, told)), "error")
            )
        if isinstance(exception, CommunicationError):
            # it quotes the process that failed: where this one waited says nothing more
            exception.__traceback__, exception.__cause__, exception.__suppress_context__ = None, None, True

    def finish(self) -> None:
        """End a run on all processes: an error of one of them after the last batch is one of all."""
        self.meet("the end of the run")
        if self.world is not None and not self._interrupted():
            if self.signals is not None:
                self.signals.end_if_asked()
            self.world.barrier()  # process 0 serves the store over which they meet: nobody leaves before all are there

    def _child_has_ended(self) -> bool:
        return isinstance(self._launcher, ScriptLauncher) and any(p.poll() is not None for p in self._launcher.procs)

    def _where(self) -> str:
        """How far the training has come."""
        trainer = self._attached()
        if trainer is None:
            return "Before the first batch."
        return f"Epoch {trainer.current_epoch}, step {trainer.global_step}."

    @override
    def teardown(self) -> None:
        self._changed.close()
        super().teardown()

    def _interrupted(self) -> bool:
        """Whether this process is on its way out because of an error: nobody may answer any more."""
        if self.signals is not None and self.signals.leaving_together:
            return False
        trainer = self._attached()
        # another Trainer may have taken the module since then
        return trainer is not None and trainer.strategy is self and trainer.state.status == TrainerStatus.INTERRUPTED

    # ------------------------------------------------------------------ collectives

    def meet(self, what: str) -> None:
        """Wait until all processes are about to do the same; not in a step, in which not all take part.

        Args:
            what: as users call it.

        Raises:
            CommunicationError: a process does something else, has failed, or does not come.
        """
        if self._meetings is not None and not self.connected.local and not self._interrupted():
            self._meetings.come(what)

    @override
    def barrier(self, name: str | None = None) -> None:
        self.meet("trainer.strategy.barrier()")
        if self.world is not None and not self._interrupted():
            self.world.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self.world is None or self._interrupted():
            return obj
        self.meet("trainer.strategy.broadcast()")
        return self.world.broadcast(obj, src)

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
        self.meet("trainer.strategy.reduce_boolean_decision()")
        return self.world.agree(decision, unanimous=all)

    def _attached(self) -> pl.Trainer | None:
        """The Trainer of the module; ``None``: it has not been attached yet."""
        return None if self.lightning_module is None else self.lightning_module._trainer

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
