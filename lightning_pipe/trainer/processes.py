"""The processes of a Trainer, arranged in pipelines and replicas: how they come up, meet, agree and fail."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_pipe.errors import CommunicationError, ConfigurationError
from lightning_pipe.trainer.launcher import ScriptLauncher
from lightning_pipe.trainer.meeting import Meetings
from lightning_pipe.trainer.signals import ENDINGS, Signals
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.failures import FailureBoard, Kind, tell


class Processes:
    """What a strategy knows of the processes of its Trainer.

    Attributes:
        world: the processes, once they are connected; they stay so after a run.
        signals: what signals ask for in this run.
    """

    def __init__(self) -> None:
        self.world: World | None = None
        self.signals: Signals | None = None
        self._meetings: Meetings | None = None
        self._trainer: Any = None

    @property
    def connected(self) -> World:
        """The processes.

        Raises:
            ConfigurationError: they are not connected yet.
        """
        if self.world is None:
            raise ConfigurationError("The processes are not connected yet.", hint="Ask from `setup` on.")
        return self.world

    @property
    def _board(self) -> FailureBoard | None:
        return None if self.world is None else self.world.transport.board

    # ------------------------------------------------------------------ beginning, end and failure

    def connect(self, trainer: pl.Trainer, open_world: Callable[[], World]) -> int:
        """Connect the processes, unless an earlier run has; returns the seed of process 0. Collective.

        Args:
            trainer: the Trainer.
            open_world: connects them.
        """
        self._check_not_failed()
        self._trainer = trainer
        if self.world is None:
            self.world = open_world()
            if self._board is not None:
                self._meetings = Meetings(self._board, self._child_has_ended)
        self.signals = Signals(trainer, self.world)
        return self.world.share_randomness()

    def _check_not_failed(self) -> None:
        """An error has ended the connections of this Trainer's processes: nobody may wait for the others again."""
        board = self._board
        if board is not None and board.failure is not None:
            name = self.connected.transport.describe()
            raise CommunicationError(
                f"{name[0].upper()}{name[1:]} cannot run this Trainer again: its last run has failed, and the "
                f"connections between its processes have ended. {board.failure}",
                hint="To go on behind an error that your code catches, catch it on all processes (those without the "
                "error of their own get a CommunicationError), and let all build another Trainer, with another "
                "PipeStrategy. The module may be the same.",
            )

    @property
    def interrupted(self) -> bool:
        """Whether this process is on its way out because of an error: nobody may answer any more."""
        if self._trainer is None or (self.signals is not None and self.signals.leaving_together):
            return False
        return bool(self._trainer.state.status == TrainerStatus.INTERRUPTED)

    def fail(self, exception: BaseException) -> None:
        """End the others as well, with the reason why this process ends.

        Args:
            exception: why.
        """
        if self.signals is not None:
            self.signals.leaving_together = False  # the hooks of callbacks have been called, and processes leave now
        board = self._board
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
            if self.signals is not None and self.signals.asked[0]:  # behind the last batch
                raise SIGTERMException
            # process 0 serves the store over which they meet: nobody leaves before all are there
            self.connected.barrier()

    def _child_has_ended(self) -> bool:
        launcher = self._trainer.strategy.launcher
        return isinstance(launcher, ScriptLauncher) and any(each.poll() is not None for each in launcher.procs)

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
        if self.world is None or self.interrupted:
            return False
        if outside_step and self.world.local:
            raise ConfigurationError(
                f"{call} is called within a step, which runs once for every micro-batch and is cut short on most "
                "ranks.",
                hint="Call it in on_train_batch_end, on all ranks.",
            )
        if self._meetings is not None and not self.world.local:
            self._meetings.come(call)
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
