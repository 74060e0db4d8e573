"""One rank failing ends all of them with that rank's traceback; a hang ends with a report of every rank.

The board keeps its entries in the store over which the processes found each other, so it works when no other
connection does any more; `lightning_pipe.transport.failures` draws how a failure reaches everybody::

    board = FailureBoard(store, transport)      # on every process
    board.watch()                               # a thread that looks at the board once a second
    board.program = actions                     # what the process is about to do, for its place in a report
    board.position = action                     # before each action; None between batches
    board.fail(error)                           # when an error leaves the strategy: publish it, wake the others
    board.asked_to_end = time.monotonic()       # SIGTERM: the process ends at its next batch, or if none comes
    board.close()                               # at the end

A process whose communication breaks asks the board why (`Transport.error` does so by itself) and raises an error that
quotes the process that failed first. A process that has waited for longer than the timeout asks all others where they
are; their answers are the report.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_pipe.errors import CommunicationError
from lightning_pipe.schedules import Action
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.failures.store import Failure, FailureStore, Kind
from lightning_pipe.transport.failures.store_client import StoreSilentError
from lightning_pipe.transport.failures.watchdog import Watchdog

_LEFT = "No rank has said why: a process may have been killed (out of memory?) or have left without an error."
_SILENT = (
    "does not answer, and the others talk to each other through its store: it was stopped (Ctrl-Z, SIGSTOP), or its "
    "host is frozen or cannot be reached."
)
_GONE = "has ended without saying why: it may have been killed (out of memory?)."
_ASKED = "was asked to end by SIGTERM"
_TOLD = {"asked": f"{_ASKED}.", "interrupted": "was interrupted (Ctrl-C)."}
_HANG = "Look at the rank that computes, or at the first rank that waits for one that does not send."


class FailureBoard:
    """Where processes enter why they fail, and read why others do.

    Args:
        store: reached by all processes; each must make its boards in the same order.
        transport: this process's transport. From now on it asks this board about its errors.
        patience: seconds to wait for the origin of a broken connection, and for answers in a report.

    Attributes:
        program: the positions that follow each other in this batch.
        noticed: set once the main thread knows of a failure.
        handled: set once the main thread is done with the user's hooks for exceptions.
        asked_to_end: when this process was asked to end, as long as it has not begun to.
    """

    def __init__(self, store: Store, transport: Transport, patience: float = 2.0) -> None:
        self.transport = transport
        self.patience = patience
        generation = store.add(f"lightning_pipe/boards/{transport.process}", 1)
        self.store = FailureStore(store, f"lightning_pipe/board/{generation}/")
        self.noticed = threading.Event()
        self.handled = threading.Event()
        self.asked_to_end: float | None = None
        self._lock = threading.Lock()
        self._thread_id = threading.get_ident()
        self.program: Sequence[object] = ()
        self._position: object | None = None
        self._beats = 0
        self._failure: Failure | None = None
        self._place: str | None = None
        self._query: str | None = None
        self._watchdog: Watchdog | None = None
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
        self._beats += 1
        if self._failure is not None and value is not None:
            raise self.explain(f"{self.transport.describe().capitalize()} stops before {value}.")

    @property
    def beats(self) -> int:
        """How often the position was set: a process whose count stands still is at the same place."""
        return self._beats

    @property
    def at_work(self) -> bool:
        """Whether the process is within a batch or waits for another one."""
        return self._position is not None or self.transport.waiting is not None

    @property
    def overdue(self) -> bool:
        """Whether the run ends since something did not come in time."""
        return self._failure is not None and self._failure.overdue

    @property
    def failed(self) -> bool:
        """Whether a process is known to have failed."""
        return self._failure is not None

    @property
    def failure(self) -> Failure | None:
        """The failure that is known here; asks nobody."""
        return self._failure

    def fail(self, error: BaseException, kind: Kind = "error") -> None:
        """Publish why this process fails and make the others stop. Never raises; call it from the main thread.

        The consequence of another process's failure is not published. Process 0 waits a moment before it returns,
        until the others have read what it wrote: the store usually goes with it.

        Args:
            error: the error.
            kind: ``"asked"`` or ``"interrupted"`` if it is none, and this process ends as it was told to.
        """
        self.noticed.set()
        self.handled.set()
        try:
            self._publish(error, kind)
            self.transport.abort()
            if self.transport.process == 0:
                self._linger()
        except RuntimeError:  # the store has gone, and with it those who would read it
            self.transport.abort()

    def becomes_reporter(self, patience: float = 0.0) -> bool:
        """Whether this process is the one that prints for the user why the run has failed.

        Process 0 prints it. If process 0 is too slow or has ended, the first other process that asks prints it. If the
        store has gone, the process that failed first does, or process 1 if that was process 0. If no process knows
        which one failed first, each prints what it knows.

        Args:
            patience: seconds that another process than 0 leaves to process 0.
        """
        process = self.transport.process
        try:
            deadline = time.monotonic() + (patience if process else 0.0)
            while time.monotonic() < deadline and not self.store.has_reporter():
                time.sleep(0.05)
            first = self.store.become_reporter(process)
        except StoreSilentError:  # no process can be asked, and process 0 cannot print
            return True
        except RuntimeError:  # the store has gone, and process 0 with it
            return self._failure is None or process == (self._failure.process or 1)
        if first and process == 0:
            time.sleep(4 * 0.05)  # until the others have seen it: the store goes with this process
        return first

    def completed(self, error: BaseException) -> None:
        """Add a note to an error of this process's own: what failed before in another process, unless it says so."""
        failure = self._failure
        if failure is None or failure.process == self.transport.process:
            return
        # An error that all processes raise (a checkpoint could not be written, a batch not loaded) ends in the same
        # words on all.
        words = [line for line in str(failure).splitlines() if line.strip()]
        if words[-1] not in "".join(traceback.format_exception(error)):
            error.add_note(str(failure))

    def explain(self, message: str, *, timed_out: bool = False) -> CommunicationError:
        """The error for an operation that failed, with what is known about the reason.

        Args:
            message: what could not be done.
            timed_out: the peer did not answer in time; if nobody has failed, all processes are asked where they are.
        """
        self.noticed.set()
        try:
            failure = self.report() if timed_out else self.await_failure(self.patience)
        except StoreSilentError:
            failure = self.silence()
        except RuntimeError:
            failure = self.loss()
        if failure is None:
            return CommunicationError(message, hint=_LEFT)
        return CommunicationError(f"{message}\n{failure}", hint=_HANG if failure.kind == "hang" else None)

    def silence(self) -> Failure:
        """What is known when the store does not answer."""
        return self._lose(Failure(0, self.transport.describe(0), _SILENT, "silent"))

    def loss(self) -> Failure:
        """What is known when the store has gone."""
        return self._lose(Failure(0, self.transport.describe(0), _GONE, "gone"))

    def lost(self, process: int, text: str) -> None:
        """Enter what has become of a process that cannot do so itself.

        Args:
            process: which one.
            text: how it ended.
        """
        failure = Failure(process, self.transport.describe(process), text, "gone")
        if self.find_failure() is None:
            self.store.publish(failure)

    def end_as_asked(self) -> Failure | None:
        """Enter that this process was asked to end while it waits for what does not come."""
        waits = f"{_ASKED}, and waits to {self.transport.waiting}."
        self.store.publish(Failure(self.transport.process, self.transport.describe(), waits, "asked"))
        return self.find_failure()

    def watch(self, interval: float = 1.0, stall: float | None = None, exit_after: float | None = 5.0) -> None:
        """Start a thread that looks at the board, for a main thread that cannot; see `Watchdog`.

        Args:
            interval: seconds between two looks.
            stall: seconds at one position that are a hang; the transport's timeout by default.
            exit_after: seconds after which a main thread that does not notice another's failure is ended with its
                process; ``None``: never.
        """
        stall = self.transport.timeout.total_seconds() if stall is None else stall
        self._watchdog = Watchdog(self, interval, stall, exit_after)
        self.transport.leave_time_to_watchdog()

    def close(self) -> None:
        """Stop watching; idempotent."""
        self.noticed.set()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        self.store.close()
        if self.transport.board is self:
            self.transport.board = None

    def find_failure(self) -> Failure | None:
        """The first failure, if one is published; answers a process that asks where this one is."""
        with self._lock:
            if self._failure is None:
                self._answer_status_query()
                if self._place is None and self.store.asked():
                    self._answer()
                self._failure = self.store.failure()
                if self._failure is not None:
                    self.store.acknowledge()
            return self._failure

    def await_failure(self, patience: float) -> Failure | None:
        """The first failure, if one is published within ``patience`` seconds, or while a report is being made."""
        start = time.monotonic()
        while (failure := self.find_failure()) is None:
            asked = self._place is not None
            if time.monotonic() - start > (patience + 2 * self.patience if asked else patience):
                break
            time.sleep(0.05)
        return failure

    def report(self) -> Failure | None:
        """Ask all processes where they are and publish the answers; or what another process has published."""
        if (failure := self.find_failure()) is not None:
            return failure
        self._answer()
        if not self.store.ask(self.transport.process):
            return self.await_failure(self.patience)
        processes = range(self.transport.topology.world_size)
        deadline = time.monotonic() + self.patience
        while any(self.store.place(process) is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        places = {process: self.store.place(process) or "no answer" for process in processes}
        describe = self.transport.describe
        text = "\n".join(f"  {describe(process)}: {place}" for process, place in places.items())
        self.store.publish(Failure(self.transport.process, describe(), text, "hang"))
        return self.find_failure()

    def _publish(self, error: BaseException, kind: Kind) -> None:
        if self.find_failure() is None:
            text = _TOLD[kind] if kind in _TOLD else "".join(traceback.format_exception(error)).rstrip()
            self.store.publish(Failure(self.transport.process, self.transport.describe(), text, kind))
            self.find_failure()

    def _lose(self, failure: Failure) -> Failure:
        """Remember a failure that cannot be published, unless a reason is known."""
        with self._lock:
            self._failure = self._failure or failure
            return self._failure

    def _linger(self) -> None:
        deadline = time.monotonic() + self.patience
        while self.store.readers() < self.transport.topology.world_size and time.monotonic() < deadline:
            time.sleep(0.05)

    def _answer(self) -> None:
        self._place = self._where()
        self.store.answer(self.transport.process, self._place)

    def _answer_status_query(self) -> None:
        """Answer a process that waits for this one: whether this one waits as well; see `trainer.meeting`."""
        asked = self.store.noted("query")
        if asked is not None and asked != self._query:
            self._query = asked
            waiting = self.transport.waiting
            place = None if waiting is None else str(waiting)
            self.store.note(f"query/{self.transport.process}", json.dumps([asked, place, self._beats, id(waiting)]))

    def _describe_position(self) -> str:
        position, program = self._position, self.program
        if position is None:
            return "between batches"
        text = _spell(position) if isinstance(position, Action) else str(position)
        return f"{text} (action {program.index(position) + 1} of {len(program)})" if position in program else text

    def _where(self) -> str:
        position = self._describe_position()
        if self.transport.waiting is not None:
            return f"{position}; waits to {self.transport.waiting}"
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or self._thread_id == threading.get_ident():
            return position
        calls = traceback.extract_stack(frame)[-3:]
        return f"{position}; computes in " + " > ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls)


def _spell(action: Action) -> str:
    """An action in words."""
    words = [action.kind.name.lower().replace("_", " "), f"stage {action.stage}"]
    if action.micro_batch is not None:
        words.append(f"micro-batch {action.micro_batch}")
    if action.pipe:
        words.append(f"pipe {action.pipe}")
    return ", ".join(words)
