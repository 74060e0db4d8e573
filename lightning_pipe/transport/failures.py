"""One rank failing ends all of them, and the reason reaches the user; after a hang each rank says where it stands.

How an error on rank 2 of four reaches everybody::

    rank 2, main thread        store (served by process 0)       the other ranks
    -------------------        ---------------------------       ---------------
    a layer raises
    board.fail(error) ------>  "failure": the traceback     (A)
      transport.abort() - - - - - - - connections close - - - >  rank 1 is blocked on rank 2: its operation fails  (B)
                               "failure" <---------------------    Transport.error asks board.explain
                                                                   raises CommunicationError with the traceback
                               "failure" <---------------------  rank 0 computes: its watchdog looks once a second  (C)
                                                                   the next `board.position = ...` raises, or
                                                                   after `patience` it aborts the transport: as (B)
                                                                   after `exit_after` it ends the process

(A) The first entry stays: a consequence of the failure does not replace it. (B) A neighbour of rank 2 notices at once.
A rank without a connection to rank 2 notices when one of its own neighbours aborts. (C) While the main thread is in a
layer, or in a collective that nobody else will join, only a thread can act. The store ends with process 0, which
therefore waits a moment before it ends. Each process prints its own error.

Nobody raises in three other cases, and each becomes an entry or an error like the one above:

* *A hang*: an operation takes longer than the timeout. The watchdog enters where its process stands and since when as
  the failure; every other watchdog prints where its own process stands, and (B) and (C) follow.
* *A killed process*: its neighbours see their connections close, wait `patience` for an entry, and say that nobody has
  said why. The process that has started it says how it has ended.
* *Process 0 itself*, and the store with it: nothing can be entered any more; each of the others ends with
  what it knows.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_pipe.errors import CommunicationError
from lightning_pipe.schedules import Action
from lightning_pipe.transport.base import Transport

SETTLED = 3.0
"""Seconds at one place from which on a process says in the store that it waits there."""
_SLACK = 7.0
"""Seconds beyond the timeout after which a process ends whose watchdog cannot."""
_LEFT = "No rank has said why: a process may have been killed (out of memory?) or have left without an error."
_GONE = "has ended without saying why, and the store with it: it may have been killed (out of memory?)."
_TOLD = {"asked": "was asked to end by SIGTERM.", "interrupted": "was interrupted (Ctrl-C)."}
_HANG = "Each rank prints where it stands: look at one that computes, or at the first that waits for one that does not."

Kind = Literal["error", "hang", "gone", "asked", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """What went wrong first.

    Args:
        process: the process where it went wrong.
        name: how messages name that process.
        text: the traceback, where the process stands, or what is known about a process that says nothing itself.
        kind: what kind of failure it is; a process that was asked to end, or interrupted, is at no fault.
    """

    process: int
    name: str
    text: str
    kind: Kind = "error"

    def __str__(self) -> str:
        failed = f"failed first:\n{self.text}"
        return f"{self.name.capitalize()} {failed if self.kind == 'error' else self.text}"


class FailureBoard:
    """Where processes enter why they fail, and read why others do.

    The board keeps its entries in the store over which the processes found each other, so it works when no other
    connection does any more. A process whose communication breaks asks the board why (`Transport.error` does so by
    itself) and raises an error that quotes the process that failed first.

    Args:
        store: reached by all processes; each must make its boards in the same order.
        transport: this process's transport. From now on it asks this board about its errors.
        patience: seconds to wait for the origin of a broken connection, for readers of a failure, for the watchdog.

    Attributes:
        noticed: set once the main thread knows of a failure.
        handled: set once the main thread is done with the user's hooks for exceptions.
        limit: seconds at one place from which on a process hangs.
        failure: the first failure, once it is known here.
    """

    def __init__(self, store: Store, transport: Transport, patience: float = 2.0) -> None:
        self.transport = transport
        self.patience = patience
        generation = store.add(f"lightning_pipe/boards/{transport.process}", 1)
        # over a connection of its own: the process's other ones may be waiting
        self._store = PrefixStore(f"lightning_pipe/board/{generation}", store.clone())  # type: ignore[attr-defined]
        self.noticed, self.handled, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self.failure: Failure | None = None
        self.limit = transport.timeout.total_seconds()
        self._main = threading.get_ident()
        self._position: object | None = None
        self._moves = 0  # how often the position was set
        self._still: tuple[int, object | None, float] = (0, None, time.monotonic())  # a place, and since when
        self._watchdog: threading.Thread | None = None
        transport.board = self

    @property
    def position(self) -> object | None:
        """What the process is doing, in any form that prints; ``None`` between batches.

        Raises:
            CommunicationError: on setting, once another process is known to have failed.
        """
        return self._position

    @position.setter
    def position(self, value: object | None) -> None:
        self._position = value
        self._moves += 1
        if self.failure is not None and value is not None:
            raise self.explain(f"{self.transport.describe().capitalize()} stops before {value}.")

    @property
    def overdue(self) -> bool:
        """Whether the run ends since something did not come in time."""
        return self.failure is not None and self.failure.kind == "hang"

    def fail(self, error: BaseException, kind: Kind = "error") -> None:
        """Publish why this process fails and make the others stop. Never raises; call it from the main thread.

        The consequence of another process's failure is not published. Process 0 returns when the others have read what
        it wrote, or are not able to within the board's patience: the store usually goes with it.

        Args:
            error: the error.
            kind: ``"asked"`` or ``"interrupted"`` if it is none, and this process ends as it was told to.
        """
        self.noticed.set()
        self.handled.set()
        everyone = [f"reads/{process}" for process in range(self.transport.topology.world_size)]
        with suppress(RuntimeError):  # the store has gone, and with it those who would read it
            if self.failure is None:
                self._publish(_TOLD.get(kind) or "".join(traceback.format_exception(error)).rstrip(), kind)
                self.transport.abort()
                if self.transport.process == 0:
                    self._await(lambda: self.has_noted(everyone))
        self.transport.abort()

    def explain(self, message: str, *, timed_out: bool = False) -> CommunicationError:
        """The error for an operation that failed, with what is known about the reason.

        Args:
            message: what could not be done.
            timed_out: the peer did not answer in time, and nobody has failed.
        """
        self.noticed.set()
        try:
            failure = self._publish(self._where(self.limit), "hang") if timed_out else self._await(self.find_failure)
        except RuntimeError:
            failure = self._loss()
        if failure is None:
            return CommunicationError(message, hint=_LEFT)
        return CommunicationError(f"{message}\n{failure}", hint=_HANG if failure.kind == "hang" else None)

    def find_failure(self) -> Failure | None:
        """The first failure, if one is published."""
        if self.failure is None and (text := self.noted("failure")) is not None:
            self.failure = Failure(**json.loads(text))
            self.note(f"reads/{self.transport.process}", "")
        return self.failure

    def note(self, key: str, text: str) -> None:
        """Enter something under a name of its own."""
        self._store.set(key, text)

    def noted(self, key: str) -> str | None:
        """What is entered under a name."""
        return self._store.get(key).decode() if self.has_noted([key]) else None

    def has_noted(self, keys: Sequence[str]) -> bool:
        """Whether something is entered under all of some names."""
        return bool(self._store.check(list(keys)))

    def _await(self, look: Callable[[], Any]) -> Any:
        """What ``look`` returns once that is true, or when the board's patience is over."""
        deadline = time.monotonic() + self.patience
        while not (found := look()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _publish(self, text: str, kind: Kind) -> Failure | None:
        failure = Failure(self.transport.process, self.transport.describe(), text, kind)
        self._store.compare_set("failure", "", json.dumps(asdict(failure)))
        return self.find_failure()

    def _loss(self) -> Failure:
        """What is known when the store has gone."""
        self.failure = self.failure or Failure(0, self.transport.describe(0), _GONE, "gone")
        return self.failure

    def _where(self, seconds: float) -> str:
        """Where this process has stood for some time, as words that follow its name."""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        place = _in_words(self._position)
        if self.transport.waiting is not None:
            place += f"; waits to {self.transport.waiting}"
        elif self._main != threading.get_ident() and (frame := sys._current_frames().get(self._main)) is not None:
            calls = traceback.extract_stack(frame)[-3:]
            place += "; computes in " + " > ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls)
        return f"has not come on since {since}, {seconds:.0f} s ago: {place}"

    # ------------------------------------------------------------------ the watchdog

    def watch(self, interval: float = 1.0, stall: float | None = None, exit_after: float = 3.0) -> None:
        """Start a thread that looks at the board every ``interval`` seconds, for a main thread that cannot.

        * Another process has failed and the main thread does not notice within the board's patience: the thread aborts
          the transport. If even that does not help within ``exit_after`` seconds, it prints the failure and ends the
          process; also if the main thread has noticed and does not come to `fail` within ``stall`` seconds.
        * The store has gone, and process 0 with it: the same, if this process is at work; else the run is ending.
        * The main thread is at the same place for longer than ``stall`` seconds: that is a hang, and the run ends.
          Every process prints where it stands and since when.
        * The store does not answer, or C code holds the interpreter's lock, beyond the timeout: Python's own
          ``faulthandler`` prints the stacks of all threads, and ends the process.
        * The main thread waits for a while: what for and how long is noted for `trainer.meeting`, anew with each look.

        Args:
            interval: seconds between two looks.
            stall: seconds at one position that are a hang; the transport's timeout by default. A shorter time lets
                every rank say where it stands before an operation of one of them ends.
            exit_after: seconds after which a main thread that does not notice another's failure is ended with its
                process.
        """
        self.limit = self.limit if stall is None else stall
        self._watchdog = threading.Thread(target=self._watch, args=(interval, exit_after), name="watchdog", daemon=True)
        self._watchdog.start()

    def close(self) -> None:
        """Stop watching; idempotent.

        The interpreter ends a thread that comes back from C++ later in the middle of C++ code, and the process dies of
        ``terminate called without an active exception`` after a run without a fault (Python 3.11, torch 2.13).
        """
        for event in (self.noticed, self.handled, self._stopped):
            event.set()
        if self._watchdog is not None:
            self._watchdog.join(self.patience)
            self._watchdog = None
        if self.transport.board is self:
            self.transport.board = None

    def _watch(self, interval: float, exit_after: float) -> None:
        try:
            failure = None
            while failure is None:
                # in case this thread stands still itself: the store does not answer, or C code has the lock
                faulthandler.dump_traceback_later(self.limit + _SLACK, exit=True, file=2)
                if self._stopped.wait(interval):
                    return
                failure = self._look()
            self._end(failure, interval, exit_after)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> Failure | None:
        still, waiting = self._seconds_still(), self.transport.waiting
        try:
            failure = self.find_failure()
            if failure is None and still > self.limit and (self._position is not None or waiting is not None):
                failure = self._publish(self._where(still), "hang")
            if failure is None and waiting is not None and still > SETTLED:
                self.note(f"waits/{self.transport.process}", f"waits to {waiting}, for {still:.2f} s")
            return failure
        except RuntimeError:
            # a process that is at work needs process 0; the others are about to end
            ends = self._stopped.wait(self.patience) or (self._position is None and self.transport.waiting is None)
            return None if ends else self._loss()

    def _seconds_still(self) -> float:
        moves, waiting, since = self._still
        # what it waits for is a new object each time
        if moves != self._moves or waiting is not self.transport.waiting:
            since = time.monotonic()
            self._still = self._moves, self.transport.waiting, since
        return time.monotonic() - since

    def _end(self, failure: Failure, interval: float, exit_after: float) -> None:
        name = self.transport.describe().capitalize()
        if self.overdue:
            tell(f"{name} {self._where(self._seconds_still())}")
            self._stopped.wait(2 * interval)  # until each process has said where it stands: an abort moves it on
        # after a hang nobody will notice anything without help
        at_once = self.overdue or failure.process == self.transport.process
        noticed = self.noticed.wait(0.0 if at_once else self.patience)
        if self._stopped.is_set():
            return
        if not noticed:
            self.transport.abort()
            noticed = self.noticed.wait(exit_after)
        # the user's hooks for exceptions may be slow, or hang
        if (noticed and self.handled.wait(self.limit)) or self._stopped.is_set():
            return
        tell(f"{name} does not react and is ended.\n{failure}")
        leave(128 + signal.SIGTERM if failure.kind == "asked" else 1)


def default_store() -> Store:
    """The store over which the processes have found each other."""
    # torch has no public way to it (2.13); Lightning and torch's own pipelining use the same function.
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _in_words(position: object | None) -> str:
    if not isinstance(position, Action):
        return "between batches" if position is None else str(position)
    words = [position.kind.name.lower().replace("_", " "), f"stage {position.stage}"]
    if position.micro_batch is not None:
        words.append(f"micro-batch {position.micro_batch}")
    if position.pipe:
        words.append(f"pipe {position.pipe}")
    return ", ".join(words)


def tell(text: str) -> None:
    """Print for the user, or do nothing if that fails.

    The reader of the output may have gone (``python train.py | head``), or its disk be full: what a process does after
    the words, ending itself or telling the others, must not depend on them.

    Args:
        text: what has happened, in whole lines.
    """
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)


def leave(code: int) -> None:
    """End the process now, from any thread, with all that was written, and with its daemonic processes."""
    with suppress(Exception):
        logging.shutdown()
    with suppress(Exception):
        for child in multiprocessing.active_children():  # a worker of a loader that hangs does not notice
            if child.daemon:
                child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
