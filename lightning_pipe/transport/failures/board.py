"""One rank failing ends all of them with that rank's traceback; after a hang each rank says where it stands.

The board keeps its entries in the store over which the processes found each other, so it works when no other
connection does any more; `lightning_pipe.transport.failures` draws how a failure reaches everybody. A process whose
communication breaks asks the board why (`Transport.error` does so by itself) and raises an error that quotes the
process that failed first.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_pipe.errors import CommunicationError
from lightning_pipe.schedules import Action
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.failures.watchdog import Watchdog

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

    Args:
        store: reached by all processes; each must make its boards in the same order.
        transport: this process's transport. From now on it asks this board about its errors.
        patience: seconds to wait for the origin of a broken connection.

    Attributes:
        noticed: set once the main thread knows of a failure.
        handled: set once the main thread is done with the user's hooks for exceptions.
        beats: how often the position was set: a process whose count stands still is at the same place.
        limit: seconds at one place from which on a process hangs.
        failure: the first failure, once it is known here.
    """

    def __init__(self, store: Store, transport: Transport, patience: float = 2.0) -> None:
        self.transport = transport
        self.patience = patience
        generation = store.add(f"lightning_pipe/boards/{transport.process}", 1)
        # over a connection of its own: the process's other ones may be waiting
        self._store = PrefixStore(f"lightning_pipe/board/{generation}", store.clone())  # type: ignore[attr-defined]
        self.noticed = threading.Event()
        self.handled = threading.Event()
        self.failure: Failure | None = None
        self.beats, self.limit = 0, transport.timeout.total_seconds()
        self._thread_id = threading.get_ident()
        self._position: object | None = None
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
        self.beats += 1
        if self.failure is not None and value is not None:
            raise self.explain(f"{self.transport.describe().capitalize()} stops before {value}.")

    @property
    def at_work(self) -> bool:
        """Whether the process is within a batch or waits for another one."""
        return self._position is not None or self.transport.waiting is not None

    @property
    def overdue(self) -> bool:
        """Whether the run ends since something did not come in time."""
        return self.failure is not None and self.failure.kind == "hang"

    @property
    def failed(self) -> bool:
        """Whether a process is known to have failed."""
        return self.failure is not None

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
        known = self.failure is not None
        try:
            if not known:
                self._publish(_TOLD.get(kind) or "".join(traceback.format_exception(error)).rstrip(), kind)
        except RuntimeError:  # the store has gone, and with it those who would read it
            known = True
        self.transport.abort()
        if self.transport.process == 0 and self.transport.topology.world_size > 1 and not known:
            time.sleep(self.patience)

    def explain(self, message: str, *, timed_out: bool = False) -> CommunicationError:
        """The error for an operation that failed, with what is known about the reason.

        Args:
            message: what could not be done.
            timed_out: the peer did not answer in time, and nobody has failed.
        """
        self.noticed.set()
        try:
            failure = self.hang() if timed_out else self.await_failure(self.patience)
        except RuntimeError:
            failure = self.loss()
        if failure is None:
            return CommunicationError(message, hint=_LEFT)
        return CommunicationError(f"{message}\n{failure}", hint=_HANG if failure.kind == "hang" else None)

    def loss(self) -> Failure:
        """What is known when the store has gone."""
        self.failure = self.failure or Failure(0, self.transport.describe(0), _GONE, "gone")
        return self.failure

    def hang(self, seconds: float | None = None) -> Failure | None:
        """Enter that this process does not come on, unless another one has failed.

        Args:
            seconds: how long it has been where it is; ``None``: for as long as it may.
        """
        return self._publish(self.where(self.limit if seconds is None else seconds), "hang")

    def watch(self, interval: float = 1.0, stall: float | None = None, exit_after: float = 3.0) -> None:
        """Start a thread that looks at the board, for a main thread that cannot; see `Watchdog`.

        Args:
            interval: seconds between two looks.
            stall: seconds at one position that are a hang; the transport's timeout by default. A shorter time lets
                every rank say where it stands before an operation of one of them ends.
            exit_after: seconds after which a main thread that does not notice another's failure is ended with its
                process.
        """
        self.limit = self.limit if stall is None else stall
        self._watchdog = Watchdog(self, interval, self.limit, exit_after)

    def close(self) -> None:
        """Stop watching; idempotent."""
        self.noticed.set()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self.transport.board is self:
            self.transport.board = None

    def find_failure(self) -> Failure | None:
        """The first failure, if one is published."""
        if self.failure is None and (text := self.noted("failure")) is not None:
            self.failure = Failure(**json.loads(text))
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

    def await_failure(self, patience: float) -> Failure | None:
        """The first failure, if one is published within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while (failure := self.find_failure()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return failure

    def where(self, seconds: float) -> str:
        """Where this process has stood for some time, as words that follow its name."""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        return f"has not come on since {since}, {seconds:.0f} s ago: {self._place()}"

    def _publish(self, text: str, kind: Kind) -> Failure | None:
        failure = Failure(self.transport.process, self.transport.describe(), text, kind)
        self._store.compare_set("failure", "", json.dumps(asdict(failure)))
        return self.find_failure()

    def _place(self) -> str:
        position = _in_words(self._position)
        if self.transport.waiting is not None:
            return f"{position}; waits to {self.transport.waiting}"
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or self._thread_id == threading.get_ident():
            return position
        calls = traceback.extract_stack(frame)[-3:]
        return f"{position}; computes in " + " > ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls)


def _in_words(position: object | None) -> str:
    if not isinstance(position, Action):
        return "between batches" if position is None else str(position)
    words = [position.kind.name.lower().replace("_", " "), f"stage {position.stage}"]
    if position.micro_batch is not None:
        words.append(f"micro-batch {position.micro_batch}")
    if position.pipe:
        words.append(f"pipe {position.pipe}")
    return ", ".join(words)
