"""The thread that looks at the failure board for a main thread that cannot."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from typing import TYPE_CHECKING

from lightning_pipe.transport.failures.leaving import leave, tell

if TYPE_CHECKING:
    from lightning_pipe.transport.failures.board import Failure, FailureBoard

SETTLED = 3.0
"""Seconds at one place from which on a process says in the store that it waits there."""
_PATIENCE = 2.0
"""Seconds that the thread gets to end."""
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
    * The store does not answer, or C code holds the interpreter's lock, beyond the timeout: Python's own
      ``faulthandler`` prints the stacks of all threads, and ends the process.
    * The main thread waits for a while: what for and how long is noted for `trainer.meeting`, anew with each look.
    """

    def __init__(self, board: FailureBoard, interval: float, stall: float, exit_after: float) -> None:
        self._board = board
        self._interval = interval
        self._stall = stall
        self._exit_after = exit_after
        self._stopped = threading.Event()
        self._place: tuple[int, object | None] = (-1, None)
        self._since = time.monotonic()
        self._noted = ""
        self._thread = threading.Thread(target=self._run, name="lightning-pipe watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the interpreter ends.

        The interpreter ends a thread that comes back from C++ later in the middle of C++ code, and the process dies of
        ``terminate called without an active exception`` after a run without a fault (Python 3.11, torch 2.13).
        """
        self._stopped.set()
        self._board.handled.set()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            while True:
                # in case this thread stands still itself: the store does not answer, or C code has the lock
                faulthandler.dump_traceback_later(self._stall + _SLACK, exit=True, file=2)
                if self._stopped.wait(self._interval):
                    return
                if (failure := self._look()) is not None:
                    self._end(failure)
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> Failure | None:
        board, still = self._board, self._seconds_still()
        try:
            failure = board.find_failure()
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
            tell(f"{name.capitalize()} {board.where(time.monotonic() - self._since)}")
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

    def _end(self, failure: Failure) -> None:
        board = self._board
        # after a hang nobody will notice anything without help
        at_once = board.overdue or failure.process == board.transport.process
        if board.overdue:
            self._stopped.wait(2 * self._interval)  # until each process has said where it stands: an abort moves it on
        noticed = board.noticed.wait(0.0 if at_once else board.patience)
        if self._stopped.is_set():
            return
        if not noticed:
            board.transport.abort()
            noticed = board.noticed.wait(self._exit_after)
        # the user's hooks for exceptions may be slow, or hang
        if (noticed and board.handled.wait(self._stall)) or self._stopped.is_set():
            return
        tell(f"{board.transport.describe().capitalize()} does not react and is ended.\n{failure}")
        leave(_ASKED_CODE if failure.kind == "asked" else 1)
