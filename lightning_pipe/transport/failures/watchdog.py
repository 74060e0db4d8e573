"""The thread that looks at the failure board for a main thread that cannot."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from typing import TYPE_CHECKING

from lightning_pipe.transport.base import Message
from lightning_pipe.transport.failures import joined_threads

if TYPE_CHECKING:
    from lightning_pipe.transport.failures.board import Failure, FailureBoard

GRACE = 10.0
"""Seconds that a process which was asked to end waits for one message: who has asked (SLURM, torchrun) kills it 30 s
after it."""
SETTLED = 3.0
"""Seconds at one place from which on a process says in the store that it waits there."""
_SLACK = 7.0
"""Seconds beyond the timeout after which a process ends whose watchdog cannot."""

_ASKED_CODE = 128 + signal.SIGTERM


class Watchdog:
    """Looks at the board every ``interval`` seconds until it is stopped.

    * Another process has failed and the main thread does not notice within the board's patience: it aborts the
      transport. If even that does not help within ``exit_after`` seconds, it prints the failure and ends the process;
      also if the main thread has noticed and does not come to `FailureBoard.fail` within ``stall`` seconds.
    * The store has gone, and process 0 with it: the same, if this process is at work; else the run is ending.
    * The main thread is at the same place for longer than ``stall`` seconds: that is a hang, and the run ends. Every
      process prints where it stands and since when.
    * This process was asked to end, and has waited for one message for some time since then: it will not come to its
      next batch, and all end now.
    * The store does not answer, or C code holds the interpreter's lock, beyond the timeout: Python's own
      ``faulthandler`` prints the stacks of all threads, and ends the process.
    * The main thread waits for a while: what for and how long is noted for `trainer.meeting`, anew with each look.
    """

    def __init__(self, board: FailureBoard, interval: float, stall: float, exit_after: float | None) -> None:
        self._board = board
        self._interval = interval
        self._stall = stall
        self._exit_after = exit_after
        self._stopped = threading.Event()
        self._place: tuple[int, object | None] = (-1, None)
        self._since = time.monotonic()
        self._noted = ""
        self._thread = joined_threads.start("watchdog", self._run, self._stop)

    def stop(self) -> None:
        """End the thread."""
        self._stop()
        self._thread.join(joined_threads.PATIENCE)

    def _stop(self) -> None:
        self._stopped.set()
        self._board.handled.set()

    def _run(self) -> None:
        try:
            while True:
                self._limit_next_look()
                if self._stopped.wait(self._interval):
                    return
                if (failure := self._look()) is not None:
                    self._end(failure)
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _limit_next_look(self) -> None:
        """End the process if this thread stands still itself: the store does not answer, or C code has the lock."""
        if self._exit_after is not None:
            faulthandler.dump_traceback_later(self._stall + _SLACK, exit=True, file=2)

    def _look(self) -> Failure | None:
        board, still = self._board, self._seconds_still()
        try:
            failure = board.find_failure()
            if failure is None and self._waits_though_asked():
                failure = board.end_as_asked()
            if failure is None and still > self._stall and board.at_work:
                failure = board.hang(still)
            if failure is None:
                self._note_waiting(still)
        except RuntimeError:
            # a process that is at work needs process 0; the others are about to end
            if self._stopped.wait(board.patience) or not board.at_work:
                return None
            failure = board.loss()
        if board.overdue:
            name = board.transport.describe()
            joined_threads.tell(f"{name.capitalize()} {board.where(time.monotonic() - self._since)}")
        return failure

    def _seconds_still(self) -> float:
        place = (self._board.beats, self._board.transport.waiting)
        # what it waits for is a new object each time
        if place[0] != self._place[0] or place[1] is not self._place[1]:
            self._place, self._since = place, time.monotonic()
        return time.monotonic() - self._since

    def _note_waiting(self, still: float) -> None:
        waiting = self._board.transport.waiting
        note = f"waits to {waiting}, for {still:.2f} s" if waiting is not None and still > SETTLED else ""
        if note != self._noted:
            self._noted = note
            self._board.note(f"waits/{self._board.transport.process}", note)

    def _waits_though_asked(self) -> bool:
        asked, waits = self._board.asked_to_end, isinstance(self._board.transport.waiting, Message)
        return asked is not None and waits and time.monotonic() - max(asked, self._since) > GRACE

    def _end(self, failure: Failure) -> None:
        board = self._board
        # after a hang nobody will notice anything without help
        at_once, asked = board.overdue or failure.process == board.transport.process, failure.kind == "asked"
        if board.overdue:
            self._stopped.wait(2 * self._interval)  # until each process has said where it stands: an abort moves it on
        noticed = board.noticed.wait(0.0 if at_once else board.patience)
        if self._stopped.is_set():
            return
        if not noticed:
            board.transport.abort()
            noticed = self._exit_after is not None and board.noticed.wait(self._exit_after)
        # the user's hooks for exceptions may be slow, or hang
        if self._exit_after is None or (noticed and board.handled.wait(self._stall)) or self._stopped.is_set():
            return
        name = board.transport.describe()
        joined_threads.tell(f"{name.capitalize()} does not react and is ended.\n{failure}")
        joined_threads.leave(_ASKED_CODE if asked else 1)
