"""The thread that looks at the failure board for a main thread that cannot."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from lightning_pipe.transport.base import Message
from lightning_pipe.transport.failures import joined_threads
from lightning_pipe.transport.failures.store import Failure
from lightning_pipe.transport.failures.store_client import StoreSilentError

if TYPE_CHECKING:
    from lightning_pipe.transport.failures.board import FailureBoard

GRACE = 10.0
"""Seconds that a process which was asked to end waits for one message: who has asked (SLURM, torchrun) kills it 30 s
after it."""

_ASKED_CODE = 128 + signal.SIGTERM


class Watchdog:
    """Looks at the board every ``interval`` seconds until it is stopped.

    * Another process asks where this one is: it answers.
    * Another process has failed and the main thread does not notice within the board's patience: it aborts the
      transport. If even that does not help within ``exit_after`` seconds, it prints the failure and ends the process;
      also if the main thread has noticed and does not come to `FailureBoard.fail` within ``stall`` seconds.
    * The store has gone, and process 0 with it: the same, if this process is at work; else the run is ending.
    * The main thread is at the same place for longer than ``stall`` seconds: that is a hang. A store that does not
      answer then is one, too: the process that serves it stands still.
    * This process was asked to end, and has waited for one message for some time since then: it will not come to its
      next batch, and all end now.
    """

    def __init__(self, board: FailureBoard, interval: float, stall: float, exit_after: float | None) -> None:
        self._board = board
        self._interval = interval
        self._stall = stall
        self._exit_after = exit_after
        self._stopped = threading.Event()
        self._place: tuple[int, object | None] = (-1, None)
        self._since = time.monotonic()
        self._thread = joined_threads.start("watchdog", self._run, self._stop)

    def stop(self) -> None:
        """End the thread."""
        self._stop()
        self._thread.join(joined_threads.PATIENCE)

    def _stop(self) -> None:
        self._stopped.set()
        self._board.handled.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            failure = self._look()
            if failure is not None:
                self._end(failure)
                return

    def _look(self) -> Failure | None:
        try:
            failure, still = self._board.find_failure(), self._stands_still()
            if failure is None and self._waits_though_asked():
                return self._board.end_as_asked()
            return self._board.report() if failure is None and still else failure
        except StoreSilentError:
            return self._board.silence() if self._stands_still() else None
        except RuntimeError:
            # a process that is at work needs process 0; the others are about to end
            if not self._stopped.wait(self._board.patience) and self._board.at_work:
                return self._board.loss()
            return None

    def _stands_still(self) -> bool:
        place = (self._board.beats, self._board.transport.waiting)
        # what it waits for is a new object each time
        if place[0] != self._place[0] or place[1] is not self._place[1] or not self._board.at_work:
            self._place, self._since = place, time.monotonic()
        return time.monotonic() - self._since > self._stall

    def _waits_though_asked(self) -> bool:
        asked, waits = self._board.asked_to_end, isinstance(self._board.transport.waiting, Message)
        return asked is not None and waits and time.monotonic() - max(asked, self._since) > GRACE

    def _end(self, failure: Failure) -> None:
        board = self._board
        # after a hang nobody will notice anything without help
        at_once, asked = failure.overdue or failure.process == board.transport.process, failure.kind == "asked"
        noticed = board.noticed.wait(0.0 if at_once else board.patience)
        if self._stopped.is_set():
            return
        if not noticed:
            board.transport.abort()
            noticed = self._exit_after is not None and board.noticed.wait(self._exit_after)
        # the user's hooks for exceptions may be slow, or hang
        if self._exit_after is None or (noticed and board.handled.wait(self._stall)) or self._stopped.is_set():
            return
        name = self._board.transport.describe()
        reason = f"\n{failure}" if self._board.becomes_reporter() else ""
        joined_threads.tell(f"{name.capitalize()} does not react and is ended.{reason}")
        joined_threads.leave(_ASKED_CODE if asked else 1)
