"""Lets all processes of a run act on a signal between the same two batches.

Lightning (2.6) broadcasts from within its handler for SIGTERM, and saves within that for SLURM's requeue signal. The
other processes may be waiting for a message of this very process, and would do so until the timeout.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipe.errors import CommunicationError
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.children import is_child
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.failures.board import Kind

ENDINGS: dict[Kind, type[BaseException]] = {"asked": SIGTERMException, "interrupted": KeyboardInterrupt}
"""What is raised in processes that are told to end, by how the failure board calls it."""

_Handler = Callable[[int, FrameType | None], None]


class Signals:
    """Notes what signals ask for, and lets all processes do it before their next training batch.

    In an evaluation SIGTERM ends this process behind its batch, and the others with it. A process that does not come to
    its next batch, because it waits for another one that hangs, is ended by the failure board's watchdog.

    SLURM's requeue signal waits for the next training batch in a validation within a training. In other evaluations it
    requeues the job at once, as in Lightning, but without a checkpoint.

    Args:
        trainer: the Trainer; its handlers are registered later.
        world: the processes.
    """

    def __init__(self, trainer: Any, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._connector = trainer._signal_connector
        self._requeue: _Handler = self._connector._slurm_sigusr_handler_fn
        self._parent = os.getppid()
        self.asked = [False, False]
        """Whether this process was asked to end, and to save and be requeued."""
        self.told = [False, False]
        """What all processes were found to be asked at the end of the last batch."""
        self.leaving_together = False
        """Whether all processes end after the same batch, so that what all must do can still be done."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of Lightning's handlers and of its question before every batch.

        Lightning registers the handlers later, and keeps what it registers until after the strategy's teardown.
        """
        predictions = self._trainer.predict_loop
        with (
            replaced(self._connector, "_sigterm_notifier_fn", self._on_termination),
            replaced(self._connector, "_slurm_sigusr_handler_fn", self._on_requeue),
            replaced(self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._act_as_told),
            replaced(predictions, "_predict_step", partial(self._predict, predictions._predict_step), gated=False),
        ):
            yield

    def _begin_to_end(self) -> None:
        """All processes leave together: what they still do, such as to save, may take its time."""
        if self._world.board is not None:
            self._world.board.noticed.set()
            self._world.board.asked_to_end = None

    def act(self, asked: Sequence[bool]) -> None:
        """Do what the processes have agreed on.

        Raises:
            SIGTERMException: they were asked to end.
        """
        end, requeue = asked
        if requeue:
            self.asked[1] = False
            self._requeue(signal.SIGUSR1, None)
        if end:
            self._connector.received_sigterm = True
            self._begin_to_end()
            raise SIGTERMException

    def end_if_asked(self) -> None:
        """End after the last batch, too, if a process was asked to. Collective.

        Raises:
            SIGTERMException: one was.
        """
        if self._world.agree(self.asked[0], unanimous=False):
            self._begin_to_end()
            raise SIGTERMException

    def _act_as_told(self) -> None:
        told, self.told = self.told, [False, False]
        self.leaving_together = told[0]
        self.act(told)

    def _predict(self, method: Callable[..., None], *arguments: Any) -> None:
        """In the place of ``_predict_step``, behind which Lightning (2.6) asks nothing, unlike other evaluations."""
        method(*arguments)
        if not self._trainer.predict_loop.batch_progress.is_last_batch and self._connector.received_sigterm:
            raise SIGTERMException

    def _on_termination(self, number: int, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self.asked[0]:
            launcher.kill(number)
        self.asked[0] = True
        if (board := self._world.board) is not None and board.asked_to_end is None:
            board.asked_to_end = time.monotonic()
        if os.getppid() != self._parent:  # the first process has gone: nobody will ask any more
            raise SIGTERMException
        if not self._trainer.training:
            self._connector.received_sigterm = True

    def _on_requeue(self, number: int, frame: FrameType | None) -> None:
        if self._trainer.state.fn == TrainerFn.FITTING:  # in a validation, too: its ranks are at different batches
            self.asked[1] = True
        else:  # nothing is there to save, and a process in the middle of a step could not gather it
            with replaced(self._trainer, "save_checkpoint", _not_saved):
                self._requeue(number, frame)


def _not_saved(*_: Any, **__: Any) -> None:
    """In the place of ``save_checkpoint``."""
    rank_zero_info("No checkpoint is saved: an evaluation changes no weights, and the requeued job begins it anew.")


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
        world = trainer.strategy.processes.world
        failure = None if world is None or world.board is None else world.board.failure
        if failure is None or failure.kind not in ENDINGS:
            raise
        raise ENDINGS[failure.kind] from None


@contextmanager
def ending_by_termination(trainer: Any) -> Iterator[None]:
    """Let SIGTERM end a run with a word and its code before Lightning (2.6) handles it, and after.

    Lightning calls the handler that it finds after its own. A process that this run has started ends at once, as the
    system has it, and the first process tells about it.

    Args:
        trainer: the Trainer.
    """
    connector = trainer._signal_connector
    main = threading.current_thread() is threading.main_thread()
    if not main or trainer.world_size == 1 or is_child() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    running = True

    def end(*_: object) -> None:
        signals = trainer.strategy.processes.signals
        if running and not (signals is not None and signals.asked[0]):  # else it acts on it, or is doing so
            raise SIGTERMException

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        running = False
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        elif connector._original_handlers.get(signal.SIGTERM) is end:  # after an error Lightning puts it back later
            connector._original_handlers[signal.SIGTERM] = signal.SIG_DFL
