"""The processes of a run on one host: the first one has started the others, and none of them outlives it."""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.failures import joined_threads
from lightning_pipe.transport.failures.board import FailureBoard

CHILD = "LIGHTNING_PIPE_CHILD"
"""The variable by which a process knows who has started it."""

_GLANCE = 0.5
_PATIENCE = 5.0
"""Seconds that a process gets: to end by itself, to notice what has happened, to end when it is asked to."""
_AFTER_SUCCESS = 30.0
_watching: list[threading.Thread] = []


class Children:
    """The processes that this one has started.

    While a run lasts, a child that fails without a message is reported: to all processes if they are connected, else to
    the user. At the end of this process none is left: first they may end by themselves, then they are asked to, and at
    last they are killed.

    Args:
        processes: by local rank, from 1 on.
        first: the global rank of this process.

    Attributes:
        board: where a failure is reported; ``None`` while the processes are not connected.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]], first: int = 0) -> None:
        self.board: FailureBoard | None = None
        self._processes, self._first = processes, first
        self._owner = os.getpid()
        self._running = 0
        self._stopped = threading.Event()
        self._noticed = threading.Event()
        self._lost = ""
        self._thread = joined_threads.start("observer of children", self._observe, self._stopped.set)
        atexit.register(self.close)

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """While the processes depend on each other. If this one fails before they are connected, the others end."""
        self._running += 1
        try:
            yield
        except BaseException:
            self._noticed.set()
            if self.board is None:
                self.end(patience=0.0)
            raise
        finally:
            self._running -= 1

    def check(self) -> None:
        """Raise if one has ended while all wait for each other to come.

        Raises:
            CommunicationError: with its name and how it has ended.
        """
        if self._lost:
            self._noticed.set()
            raise CommunicationError(self._lost, hint="What it has printed itself stands above.")

    def end(self, patience: float = _PATIENCE) -> None:
        """End those that do not end by themselves within ``patience`` seconds."""
        if os.getpid() != self._owner:  # this is a copy of the process
            return
        atexit.unregister(self.close)
        self._wait(patience)
        for number in (signal.SIGTERM, signal.SIGCONT):  # a process that is stopped takes no other signal
            self._send(number)
        self._wait(_PATIENCE)
        self._send(signal.SIGKILL)
        self._wait(_PATIENCE)

    def close(self) -> None:
        """End what is left of them at the end of this process, and let it fail if one of them has failed."""
        if os.getpid() != self._owner:
            return
        self._stopped.set()
        self._noticed.set()
        failed = joined_threads.has_failed() or hasattr(sys, "last_value")  # the error that has ended this process
        self._wait(_PATIENCE if failed else _AFTER_SUCCESS)
        codes = {rank: process.poll() for rank, process in enumerate(self._processes, 1)}
        self.end(patience=0.0)
        for rank, code in codes.items():
            if not failed and code != 0:
                joined_threads.tell(f"Process {self._first + rank} {_words(code)}.")
                joined_threads.fail_at_end(1)

    def _observe(self) -> None:
        while not self._stopped.wait(_GLANCE):
            if not self._running or joined_threads.has_failed():
                continue
            for rank, process in enumerate(self._processes, 1):
                code = process.poll()
                # one that has ended well is missed before all are connected, or where somebody waits for it
                missed = self.board is None or self.board.noticed.is_set()
                if code or (code == 0 and missed):
                    self._tell(self._first + rank, f"{_words(code)} (PID {process.pid})")
                    return

    def _tell(self, process: int, how: str) -> None:
        if self.board is not None:
            with suppress(RuntimeError):  # else the store has gone, and this process is ending
                if self.board.await_failure(_GLANCE) is None:  # it may have said why
                    self.board.lost(process, how)
            return
        self._lost = f"Process {process} {how}, before all processes were connected."
        if self._noticed.wait(_PATIENCE) or not self._running:
            return
        # the main thread waits in C++, or is busy with what the others will never take part in
        joined_threads.tell(self._lost)
        self.end(patience=0.0)
        joined_threads.leave(1)

    def _left(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _send(self, number: int) -> None:
        for process in self._left():
            process.send_signal(number)


def end_with_parent() -> None:
    """In a process that a launcher has started: end when the one that has started it ends, in whatever way.

    The system's way (``PR_SET_PDEATHSIG``) comes too late for a parent that has gone already, and sends a signal that
    Python does not act on while the main thread waits in C++.
    """
    if not is_child() or _watching:
        return
    parent = int(os.environ[CHILD])
    lives, stopped = _life_of(parent), threading.Event()

    def leave() -> None:
        me = f"Process {os.environ.get('LOCAL_RANK')} of this host"
        joined_threads.tell(f"{me} ends: process 0 (PID {parent}), which has started it, has gone.")
        joined_threads.leave(1)

    def watch() -> None:
        while lives():
            if stopped.wait(_GLANCE):
                return
        if not stopped.wait(_PATIENCE):  # else the main thread has noticed, and has said more about it
            leave()

    if not lives():  # nobody is there to say more
        leave()
    _watching.append(joined_threads.start("observer of the parent", watch, stopped.set))
    # The interpreter's last collection goes through every object of torch and Lightning: 1.2 s of 6 (Python 3.11). The
    # first process waits for this one, and a machine that many processes share makes it ten seconds.
    atexit.register(gc.freeze)


def is_child() -> bool:
    """Whether a launcher has started this process, whose output is that of the first one."""
    return bool(os.environ.get(CHILD))


def _life_of(process: int) -> Callable[[], bool]:
    """Tells whether a process lives; one whose end nobody has waited for yet does not."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return lambda: False
    except (AttributeError, OSError):  # not on Linux
        started_by = os.getppid()
        return lambda: os.getppid() == started_by
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return lambda: not poll.poll(0)


def _words(code: int | None) -> str:
    """How a process has ended."""
    if code is None:
        return "did not end when the first process did, and was stopped"
    if code >= 0:
        return f"has ended with code {code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"was killed by signal {-code}"
