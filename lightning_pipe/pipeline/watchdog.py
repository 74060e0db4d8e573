"""The thread that looks at the failure board for a main thread that cannot."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from lightning_pipe.pipeline.bulletin import Bulletin, Failure

if TYPE_CHECKING:
    from lightning_pipe.pipeline.failure import FailureBoard


class Watchdog:
    """Looks at the board every ``interval`` seconds until it is stopped.

    * Another process asks where this one is: it answers.
    * Another process has failed and the main thread does not notice within the board's patience: it aborts the
      transport. If even that does not help within ``exit_after`` seconds, it prints the failure and ends the process.
    * The store has gone, and process 0 with it: the same, if a batch is under way; else the run is ending.
    * The position stands still for longer than ``stall`` seconds: that is a hang. On a GPU the host does not wait for
      messages, so nothing else would time out.
    """

    def __init__(
        self, board: FailureBoard, bulletin: Bulletin, interval: float, stall: float, exit_after: float | None
    ) -> None:
        self._board = board
        self._bulletin = bulletin
        self._interval = interval
        self._stall = stall
        self._exit_after = exit_after
        self._stopped = threading.Event()
        self._beats = -1
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lightning-pipe watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(2 * self._interval)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                failure = self._board.find_failure(self._bulletin)
                if failure is None and self._stands_still():
                    failure = self._board.report(self._bulletin)
            except RuntimeError:
                failure = self._store_gone()
                if failure is None:
                    return
            if failure is not None:
                self._end(failure)
                return

    def _store_gone(self) -> Failure | None:
        """The failure of process 0, unless the run is ending."""
        if self._stopped.wait(self._board.patience) or self._board.position is None:
            return None
        return Failure(0, self._board.transport.describe(0), "The store has gone, and the process that serves it.")

    def _stands_still(self) -> bool:
        if self._board.beats != self._beats or self._board.position is None:
            self._beats = self._board.beats
            self._since = time.monotonic()
        return time.monotonic() - self._since > self._stall

    def _end(self, failure: Failure) -> None:
        if self._board.noticed.wait(self._board.patience) or self._stopped.is_set():
            return
        self._board.transport.abort()
        if self._exit_after is None or self._board.noticed.wait(self._exit_after):
            return
        name = self._board.transport.describe()
        reason = f"\n{failure}" if self._board.may_tell() else ""
        print(f"{name.capitalize()} does not react and is ended.{reason}", file=sys.stderr, flush=True)
        os._exit(1)
