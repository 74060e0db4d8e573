"""Finds out at once when one process does alone what all processes must do together.

``trainer.save_checkpoint()`` and ``trainer.strategy.barrier()`` under ``if trainer.is_global_zero`` would meet other
collectives of the other processes: Gloo ends the process when the sizes differ, and waits for the timeout otherwise. So
the processes first meet over the store, where each one says what it is about to do.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_pipe.errors import CollectiveError, PipeError
from lightning_pipe.transport.failures.board import FailureBoard
from lightning_pipe.transport.failures.store_client import StoreSilentError

_SOON, _LATE = 0.0005, 0.02
"""Seconds between two looks at the store, at first and later on."""
_PAUSE = 1.5
"""Seconds between two status queries: a watchdog answers once a second."""
_QUERIES = 4
"""Status queries after which a process that waits for something else is known not to come."""
_LIBRARIES = ("lightning_pipe", "lightning", "lightning_utilities", "torch", "contextlib", "runpy")


class Meetings:
    """Where the processes of a run meet.

    Args:
        board: where failures are reported; its watchdog answers status queries.
        gone: whether a process has ended that this one has started.
    """

    def __init__(self, board: FailureBoard, gone: Callable[[], bool]) -> None:
        self._board, self._transport, self._gone = board, board.transport, gone
        self._count = 0

    def come(self, what: str) -> None:
        """Return when all processes have come to do the same.

        Args:
            what: as users call it.

        Raises:
            CollectiveError: a process does something else, or waits for something else.
            CommunicationError: a process fails, or does not come in time.
        """
        # Every process counts its own meetings, so two that are about to do different things meet under one key, where
        # `_compare` sees the difference.
        self._count += 1
        operation = f"{what}, for which all processes must come together"
        before, self._transport.waiting = self._transport.waiting, operation
        try:
            self._meet(what, f"meeting/{self._count}/")
        except PipeError:
            raise
        except RuntimeError as error:
            raise self._transport.error(f"do {operation}", error) from None
        finally:
            self._transport.waiting = before

    def _meet(self, what: str, key: str) -> None:
        store, entry = self._board.store, json.dumps([what, caller()])
        keys = [f"{key}{process}" for process in self._processes]
        deadline = time.monotonic() + self._transport.timeout.total_seconds()
        pause, entered = _SOON, False
        query = _StatusQuery(self._board, self._transport.process)
        while True:
            with suppress(StoreSilentError):  # process 0 stands still: no fault yet
                if not entered:
                    store.note(keys[self._transport.process], entry)
                    entered = True
                if (found := store.noted_by_all(keys)) is not None:
                    self._compare(what, found)
                    return
                if query.due:
                    self._compare(what, [store.noted(name) for name in keys])
                    self._look_for(what, key, query)
            time.sleep(pause)
            pause = min(1.2 * pause, _LATE)
            if self._board.failed or time.monotonic() > deadline:
                raise self._transport.error(f"do {what} together", None, timed_out=not self._board.failed)

    def _compare(self, what: str, entries: Sequence[str | None]) -> None:
        """Raise if another process does something else."""
        for process, entry in enumerate(entries):
            found, line = json.loads(entry) if entry is not None else (what, "")
            if found != what:
                name = self._transport.describe(process)
                raise _alone(f"{what} is called on {self._name}, {found} on {name} ({line}).")

    def _look_for(self, what: str, key: str, query: _StatusQuery) -> None:
        """Raise if a process that has not come will not do so any more."""
        missing = [process for process in self._processes if self._board.store.noted(f"{key}{process}") is None]
        if missing and self._gone():
            raise _alone(f"{what} is called on {self._name} after another process has ended.")
        places = query.ask(missing) if missing else None
        if places is not None:
            where = "; ".join(f"{self._transport.describe(p)} waits to {place}" for p, place in places.items())
            raise _alone(f"{what} is called on {self._name}, and not on all others: {where}.")

    @property
    def _processes(self) -> range:
        return range(self._transport.topology.world_size)

    @property
    def _name(self) -> str:
        return self._transport.describe()


def caller() -> str:
    """The innermost line of the user's code that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "of unknown origin"


def _alone(text: str) -> CollectiveError:
    hint = "Call it on all processes, outside of `if trainer.is_global_zero:` and the like."
    return CollectiveError(f"{text[0].upper()}{text[1:]}", hint=hint)


class _StatusQuery:
    """Asks the processes that have not come whether they wait for something else."""

    def __init__(self, board: FailureBoard, process: int) -> None:
        self._board, self._process = board, process
        self._asked = time.monotonic()
        self._number = self._same = 0
        self._before: dict[int, Any] = {}

    @property
    def due(self) -> bool:
        return time.monotonic() - self._asked > _PAUSE

    def ask(self, missing: list[int]) -> dict[int, str] | None:
        """What all of them wait for, once they have done so for a while without a change."""
        found: dict[int, Any] = {}
        for process in missing:
            text = self._board.store.noted(f"query/{process}")
            asked, *state = json.loads(text) if text is not None else [None]
            if asked == f"{self._process}/{self._number}" and state[0] is not None:
                found[process] = state
        # A process that works may wait at the time of one query: only a state that does not change says that it stays.
        same = len(found) == len(missing) and found == self._before
        self._same, self._before = self._same + 1 if same else 0, found
        self._number += 1
        self._asked = time.monotonic()
        self._board.store.note("query", f"{self._process}/{self._number}")
        return {process: str(state[0]) for process, state in found.items()} if self._same >= _QUERIES - 1 else None
