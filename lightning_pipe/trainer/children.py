"""The processes of a run on one host: the first one has started the others, and none of them outlives it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from lightning_pipe.transport.failures.leaving import leave, tell

CHILD = "LIGHTNING_PIPE_CHILD"
"""The variable by which a process knows who has started it."""

_PR_SET_PDEATHSIG = 1
_GLANCE = 0.5
_NOTICING = 6.0
"""Seconds that the first process gets to notice, and to end by itself, when another one has failed."""
_AFTER_FAILURE, _AFTER_SUCCESS = 3.0, 30.0
"""Seconds that the others get to end by themselves when the first one ends."""
_WELL = (0, 128 + signal.SIGTERM)
"""Codes that are no failure: all end when one is asked to, and the first process may still be writing a checkpoint."""


class Children:
    """The processes that this one has started, as Lightning's observer has it, which would give this one no time.

    When one of them fails, this process ends as well, by itself if it notices what has become of it. At the end of this
    process none is left.

    Args:
        processes: by local rank, from 1 on.

    Attributes:
        failed: whether the last run of this process has ended with an error.
    """

    failed = False

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes, self._owner = processes, os.getpid()
        self._stopped = threading.Event()
        threading.Thread(target=self._observe, name="lightning-pipe observer of children", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """Leave none of them behind, and let this process fail if one of them has failed."""
        if os.getpid() != self._owner:  # this is a copy of the process, which has no children
            return
        self._stopped.set()
        failed = self.failed or hasattr(sys, "last_value")  # the error that has ended this process
        self.end(_AFTER_FAILURE if failed else _AFTER_SUCCESS)
        if not failed and (lost := self._lost()):
            tell(lost)
            leave(1)

    def end(self, patience: float) -> None:
        """Wait for them, and kill those that are left after ``patience`` seconds."""
        self._stopped.set()
        atexit.unregister(self.close)
        deadline = time.monotonic() + patience
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()  # nothing, if it has ended
            process.wait()

    def _observe(self) -> None:
        while not self._stopped.wait(_GLANCE):
            if self._lost():
                break
        if not self._stopped.wait(_NOTICING):
            tell(f"{self._lost()} All processes of this host end.")
            self.end(0.0)
            leave(1)

    def _lost(self) -> str:
        """Which of them have failed, in words."""
        codes = {local_rank: process.poll() for local_rank, process in enumerate(self._processes, 1)}
        return " ".join(
            f"Process {rank} of this host {_words(code)}."
            for rank, code in codes.items()
            if code is not None and code not in _WELL
        )


def end_with_parent() -> None:
    """In a process that a launcher has started: end when the one that has started it ends, in whatever way."""
    if not os.environ.get(CHILD):
        return
    if sys.platform == "linux":
        # SIGKILL: Python does not act on other signals while the main thread waits in C++
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[CHILD]):
            tell(f"This process ends: the one that has started it (PID {os.environ[CHILD]}) has gone.")
            leave(1)
    # The interpreter's last collection goes through every object of torch and Lightning: 1.2 s of 6 (Python 3.11). The
    # first process waits for this one, and a machine that many processes share makes it ten seconds.
    atexit.register(gc.freeze)


def _words(code: int) -> str:
    """How a process has ended."""
    if code > 0:
        return f"has ended with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
