"""Lets all processes of a run act on a signal between the same two batches.

Lightning (2.6) broadcasts from within its handler for SIGTERM, and saves within that for SLURM's requeue signal. The
other processes may be waiting for a message of this very process, and would do so until the timeout.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipe.errors import CommunicationError
from lightning_pipe.patches import replaced
from lightning_pipe.transport.failures import Kind

ENDINGS: dict[Kind, type[BaseException]] = {"asked": SIGTERMException, "interrupted": KeyboardInterrupt}
"""What is raised in processes that are told to end, by how the failure board calls it."""

_Handler = Callable[[int, FrameType | None], None]
_ALONE = 3.0
"""Seconds that a process which was asked to end waits for process 0 to say so too: who asks mostly asks all of them."""


class Signals:
    """Notes what signals ask for, and lets all processes do it before their next training batch.

    The ranks with the last stage, process 0 among them, tell the others with their report about a batch. A process that
    was asked to end, and they were not, ends a little later by itself, and the others with it, as in an evaluation. One
    that does not come to its next batch, because it waits for another that hangs, ends with that one at the timeout.

    SLURM's requeue signal waits for the next training batch in a validation within a training. In other evaluations
    nothing is there to save, and it is told and ignored.

    Args:
        trainer: the Trainer; its handlers are registered later.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._signal_connector
        self._requeue: _Handler = self._connector._slurm_sigusr_handler_fn
        self.asked = [False, False]
        """Whether this process was asked to end, and to save and be requeued."""
        self.told = [False, False]
        """What the report about the last batch says of it."""
        self.leaving_together = False
        """Whether all processes end after the same batch, so that what all must do can still be done."""
        self._since: float | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of Lightning's handlers and of its question before every batch.

        Lightning registers the handlers later, and keeps what it registers until after the strategy's teardown.
        """
        with (
            replaced(self._connector, "_sigterm_notifier_fn", self._on_termination),
            replaced(self._connector, "_slurm_sigusr_handler_fn", self._on_requeue),
            replaced(self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self.act),
        ):
            yield

    def act(self) -> None:
        """Before a training batch: do what the report about the last one says.

        Raises:
            SIGTERMException: the processes were asked to end, or this one alone.
        """
        (end, requeue), self.told = self.told, [False, False]
        world = self._trainer.strategy.world
        self.leaving_together = end
        if end or requeue:  # a process that leaves first would take its messages along
            self._trainer.strategy.run.loaders.channel.flush()
            world.barrier()
        if requeue:
            self.asked[1] = False
            self._requeue(signal.SIGUSR1, None)
        if end:
            self._connector.received_sigterm = True
            if world.board is not None:  # all leave together: what they still do, such as to save, takes its time
                world.board.noticed.set()
            raise SIGTERMException
        if self.asked[0]:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > _ALONE:
                raise SIGTERMException

    def _on_termination(self, number: int, _: FrameType | None) -> None:
        if self.asked[0]:
            return
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(number)
        self.asked[0] = True
        if not self._trainer.training:  # in an evaluation nothing is to be saved
            raise SIGTERMException

    def _on_requeue(self, *_: Any) -> None:
        self.asked[1] = True  # in a validation, too: its ranks are at different batches
        if self._trainer.state.fn != TrainerFn.FITTING:
            rank_zero_info("SLURM's signal to requeue: an evaluation is not requeued. Start its job again.")


@contextmanager
def leaving_with_others(trainer: Any) -> Iterator[None]:
    """Let SIGTERM or Ctrl-C to another process end this one in the same way.

    Args:
        trainer: the Trainer.

    Raises:
        SIGTERMException: a message has failed since another process was asked to end.
        KeyboardInterrupt: a message has failed since another process was interrupted.
    """
    try:
        yield
    except CommunicationError:
        board = trainer.strategy.world.board
        failure = None if board is None else board.failure
        if failure is None or failure.kind not in ENDINGS:
            raise
        raise ENDINGS[failure.kind] from None
