"""The processes of a Trainer, arranged in pipelines and replicas: how they come up, meet, agree and fail."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_pipe.config import RunLayout
from lightning_pipe.engine.first_batch.trial_runs import is_alone
from lightning_pipe.errors import CommunicationError, ConfigurationError, PipeError
from lightning_pipe.trainer.connect import connect, listen_on_loopback
from lightning_pipe.trainer.launcher import ScriptLauncher
from lightning_pipe.trainer.meeting import Meetings
from lightning_pipe.trainer.signals import ENDINGS, Signals
from lightning_pipe.transport.arrangement import open_transport, topology_of
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.failures import FailureBoard, Kind, default_store, tell
from lightning_pipe.transport.topology import Topology

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy

T = TypeVar("T")
_LATER = timedelta(seconds=10)
"""How much longer than the timeout an operation waits: until then the failure board has named every rank's place."""


def check_world_size(devices: int, num_nodes: int, environment: ClusterEnvironment) -> None:
    """Compare the processes that have come up with those that the Trainer asks for.

    Raises:
        ConfigurationError: the numbers differ; otherwise some would wait for processes that never come.
    """
    asked, found = num_nodes * devices, {"the cluster environment": environment.world_size()}
    if "WORLD_SIZE" in os.environ:
        found["the launcher (WORLD_SIZE)"] = int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        found["torch.distributed"] = dist.get_world_size()
    for who, size in found.items():
        if size != asked:
            raise ConfigurationError(
                f"The Trainer asks for {asked} processes (num_nodes={num_nodes} x devices={devices}), but {who} has "
                f"{size}.",
                hint=f"Start {asked} processes, or choose num_nodes and devices so that they multiply to {size}.",
            )


@dataclass
class Connection:
    """What the processes have in common until they end: one Trainer after the other, for which they lie alike, uses it.

    Args:
        transport: moves what they exchange.
        replicas: torch's group of the processes with the same rank in all pipelines; ``None`` if there is one pipeline.
        meetings: where they meet; ``None`` for one process alone.
        owner: the process that has connected; a copy of it that the user's code has made closes nothing.
        user: gives the world of the Trainer that uses it, as long as that lasts.
    """

    transport: Transport
    replicas: Any = None
    meetings: Meetings | None = None
    owner: int = field(default_factory=os.getpid)
    user: Callable[[], World | None] = lambda: None

    def end(self) -> None:
        """Close at the end of the process; after a failure others may be missing, and nobody waits for them."""
        if os.getpid() != self.owner:
            return
        board = self.transport.board
        failed = board is not None and board.noticed.is_set()
        if board is not None:
            board.close()
        if not failed:
            self.replicas = None  # a group that is referred to keeps its connections
            _CONNECTIONS.clear()
            self.transport.close()
            if dist.is_initialized():
                dist.destroy_process_group()


_CONNECTIONS: dict[Any, Connection] = {}
"""By what they depend on: torch's group of all processes, how these are arranged, and options."""


class World:
    """The processes, seen from one of them. They stay connected after a run.

    Attributes:
        layout: sizes of pipelines and replicas, once they are connected.
        local: while a user's step runs, in which not all processes take part: collectives concern the replicas alone.
        signals: what signals ask for in this run.
    """

    layout: RunLayout
    signals: Signals

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self.local = False
        self._trainer: Any = None

    def begin_run(self, trainer: pl.Trainer) -> None:
        """A Trainer begins a run, for which the processes may have to be connected."""
        self._trainer, self.signals = trainer, Signals(trainer)

    @property
    def transport(self) -> Transport:
        """This process's transport.

        Raises:
            ConfigurationError: the processes are not connected yet.
        """
        if self._connection is None:
            raise ConfigurationError("The processes are not connected yet.", hint="Ask from `setup` on.")
        return self._connection.transport

    @property
    def replicas(self) -> Any:
        """Torch's group of the processes with the same rank in all pipelines; ``None`` if there is one pipeline."""
        return None if self._connection is None else self._connection.replicas

    @property
    def board(self) -> FailureBoard | None:
        """Where processes say why they fail, if there are several."""
        return None if self._connection is None else self._connection.transport.board

    # ------------------------------------------------------------------ beginning, end and failure

    def open(self, options: PipeStrategy) -> None:
        """Connect the processes, unless an earlier run or Trainer has. Collective.

        The rank with the schedule's loss becomes the first process of each pipeline.

        Args:
            options: the strategy, which has the user's options, and knows the devices and the cluster environment.

        Raises:
            CommunicationError: a process does not come, or the last run of these processes has failed.
        """
        if self._connection is not None:
            if self.board is not None and self.board.failure is not None:
                name = self.transport.describe()
                raise CommunicationError(
                    f"{name[0].upper()}{name[1:]} cannot run this Trainer again: its last run has failed, and the "
                    f"connections between its processes have ended. {self.board.failure}",
                    hint="To go on behind an error that your code catches, catch it on all processes (those without "
                    "the error of their own get a CommunicationError), and let all build another Trainer, with another "
                    "PipeStrategy. The module may be the same.",
                )
            return
        layout, device, environment = options.layout, options.root_device, options.cluster_environment
        assert environment is not None
        timeout, hosts = options.timeout, options.num_nodes
        self.layout, topology = layout, topology_of(layout, options.family, options.rank_order, hosts)
        if topology.tensor > 1:
            topology = replace(topology, tensor_rank=environment.global_rank() % topology.tensor)
        if layout.world_size == 1:
            self._connection = Connection(open_transport(topology, device, timeout))
            return
        backend = options.process_group_backend or dist.get_default_backend_for_device(device)
        if hosts == 1:
            listen_on_loopback()
        with _connecting(timeout):
            connect(environment, backend, timeout, hosts)
            key = dist.group.WORLD, topology, device, timeout, backend
            if (known := _CONNECTIONS.get(key)) is not None:
                gc.collect()  # a Trainer and its parts refer to each other
                self._connection = known
                known = known if self.agree(known.user() is None, unanimous=True) else None
            if known is None:
                known = _CONNECTIONS[key] = _connected(topology, device, timeout, options.launcher)
            self._connection, known.user = known, weakref.ref(self)

    def share_randomness(self) -> int:
        """Continue everywhere from the random state of process 0, as one device would; returns its seed."""
        mine = (torch.get_rng_state(), torch.initial_seed())
        state, seed = self.transport.broadcast_object(mine, 0, self.everyone)
        torch.set_rng_state(state)
        return int(seed)

    @property
    def interrupted(self) -> bool:
        """Whether this process is on its way out because of an error: nobody may answer any more."""
        if self._trainer is None or self.signals.leaving_together:
            return False
        return bool(self._trainer.state.status == TrainerStatus.INTERRUPTED)

    def fail(self, exception: BaseException) -> None:
        """End the others as well, with the reason why this process ends.

        Args:
            exception: why.
        """
        _CONNECTIONS.clear()  # a Trainer that is built behind the error connects the processes anew
        if self._trainer is not None:
            self.signals.leaving_together = False  # the hooks of callbacks have been called, and processes leave now
        board = self.board
        if isinstance(exception, SIGTERMException) and exception.code is None:
            # Lightning (2.6) ends with code 0 and without a word, as after a run that has finished
            exception.code = 128 + signal.SIGTERM
            if getattr(rank_zero_only, "rank", 0) == 0:
                reason = "it was asked to by SIGTERM." if board is None or board.failure is None else board.failure
                tell(f"The run ends: {reason}")
        if board is not None:
            kind: Kind = next((kind for kind, told in ENDINGS.items() if isinstance(exception, told)), "error")
            board.fail(exception, kind)
        if isinstance(exception, CommunicationError):
            # it quotes the process that failed: where this one waited says nothing more
            exception.__traceback__, exception.__cause__, exception.__suppress_context__ = None, None, True

    def finish(self) -> None:
        """End a run on all processes: an error of one of them after the last batch is one of all."""
        if self.meet("the end of the run"):
            if self.signals.asked[0]:  # behind the last batch
                raise SIGTERMException
            # process 0 serves the store over which they meet: nobody leaves before all are there
            self.barrier()

    # ------------------------------------------------------------------ what all of them do together

    def meet(self, call: str, *, outside_step: bool = False) -> bool:
        """Wait until all processes are about to do the same; not in a step, in which not all take part.

        Args:
            call: what is called, as users write it.
            outside_step: whether it cannot be done in a step, where processes do not come to the same places.

        Returns:
            Whether other processes may be asked: not before they are connected, nor after an error.

        Raises:
            ConfigurationError: a step runs.
            CommunicationError: a process does something else, has failed, or does not come.
        """
        if self._connection is None or self.interrupted:
            return False
        if outside_step and self.local:
            raise ConfigurationError(
                f"{call} is called within a step, which runs once for every micro-batch and is cut short on most "
                "ranks.",
                hint="Call it in on_train_batch_end, on all ranks.",
            )
        if self._connection.meetings is not None and not self.local:
            self._connection.meetings.come(call)
        return True

    def stop(self) -> None:
        """Training batches end: one process that stops alone must not wait for the others for ever."""
        self.meet("the end of training batches (by trainer.should_stop, or their number)")

    def meet_to_gather(self, call: str) -> None:
        """The same for what can be done neither in a step nor after an error.

        Raises:
            ConfigurationError: a step runs, or the run has ended with an error.
        """
        if self.interrupted:
            raise ConfigurationError(
                f"{call}: after an error the stages cannot be gathered any more.", hint="Load the last checkpoint."
            )
        self.meet(call, outside_step=True)

    # ------------------------------------------------------------------ collectives

    @property
    def everyone(self) -> tuple[int, ...]:
        """All processes."""
        return self.transport.topology.everyone

    @property
    def replica_members(self) -> tuple[int, ...]:
        """The processes with the same rank in all pipelines; in a trial run, which others may not make, this one."""
        processes = self.transport.topology.replica_processes(self.transport.rank)
        return (self.transport.process,) if is_alone() else processes

    def barrier(self) -> None:
        """Wait for all processes."""
        if not self.local:
            self.transport.barrier()

    def broadcast(self, obj: T, source: int) -> T:
        """The object of one process, on all; in a step that of its replica."""
        members = self.replica_members if self.local else self.everyone
        if len(members) == 1:
            return obj
        source = members[self.transport.topology.locate(source)[0]] if self.local else source
        shared: T = self.transport.broadcast_object(obj, source, members)
        return shared

    def agree(self, decision: bool, *, unanimous: bool) -> bool:
        """Whether all processes, or any of them, say yes."""
        # in a step only the ranks of the same stage are sure to ask
        members = self.replica_members if self.local else self.everyone
        return self.any_of([decision != unanimous], members)[0] != unanimous

    def any_counterpart(self, flags: list[bool]) -> list[bool]:
        """Whether any process says yes to each question, of those that have this rank in their pipeline."""
        flags = self.any_of(flags, self.replica_members)
        return self.any_of(flags, self.transport.topology.tensor_processes(self.transport.process))

    def any_of(self, flags: list[bool], members: tuple[int, ...]) -> list[bool]:
        """Whether any process of a group says yes to each question."""
        if len(members) == 1:
            return flags
        said = torch.tensor(flags, dtype=torch.long)
        self.transport.all_reduce(said, members, "max").wait()
        return [bool(each) for each in said]


def _connected(topology: Topology, device: torch.device, timeout: timedelta, launcher: object) -> Connection:
    """Connect the processes in a new arrangement. Collective."""
    transport = open_transport(topology, device, timeout + _LATER)
    replicas = None
    if topology.replicas > 1:
        groups = [each.replica_processes(n) for n in range(topology.ranks) for each in topology.tensor_slices]
        made = [dist.new_group(sorted(group), timeout=timeout) for group in groups]
        replicas = next(each for each, group in zip(made, groups, strict=True) if transport.process in group)
    board = FailureBoard(default_store(), transport)
    board.watch(stall=timeout.total_seconds())
    children = launcher.procs if isinstance(launcher, ScriptLauncher) else ()
    meetings = Meetings(board, lambda: any(child.poll() is not None for child in children))
    connection = Connection(transport, replicas, meetings)
    atexit.register(connection.end)
    return connection


@contextmanager
def _connecting(timeout: timedelta) -> Generator[None, None, None]:
    """Words for what torch raises while processes are connected."""
    try:
        yield
    except PipeError:
        raise
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        raise CommunicationError(
            f"The processes could not be connected: {reason}",
            hint="Look for the first error of another process; one may have been killed (out of memory?), or have "
            f"stood still for longer than {timeout.total_seconds():g} s.",
        ) from error
