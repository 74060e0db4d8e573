"""Finds out at once when one process does alone what all processes must do together.

``trainer.save_checkpoint()`` and ``trainer.strategy.barrier()`` under ``if trainer.is_global_zero`` would meet other
collectives of the other processes: Gloo ends the process when the sizes differ, and waits for the timeout otherwise. So
the processes first meet over the store, where each one says what it is about to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lightning_pipe.errors import CollectiveError, PipeError
from lightning_pipe.transport.failures import SETTLED, FailureBoard

_SOON, _LATE = 0.0005, 0.02
"""Seconds between two looks at the store, at first and later on."""


class Meetings:
    """Where the processes of a run meet.

    Args:
        board: where failures are reported; its watchdog notes what a process waits for.
        gone: whether a process has ended that this one has started.
    """

    def __init__(self, board: FailureBoard, gone: Callable[[], bool]) -> None:
        self._board, self._transport, self._gone = board, board.transport, gone
        self._processes, self._name = range(board.transport.topology.world_size), board.transport.describe()
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
        board = self._board
        board.note(f"{key}{self._transport.process}", what)
        keys = [f"{key}{process}" for process in self._processes]
        start = looked = time.monotonic()
        pause = _SOON
        before: dict[int, str | None] = {}
        while not board.has_noted(keys):
            if time.monotonic() - looked > SETTLED / 2:
                looked = time.monotonic()
                self._compare(what, [board.noted(name) for name in keys])
                before = self._look_for(what, keys, before)
            time.sleep(pause)
            pause = min(1.2 * pause, _LATE)
            late = time.monotonic() - start > self._transport.timeout.total_seconds()
            if board.failure is not None or late:
                raise self._transport.error(f"do {what} together", None, timed_out=board.failure is None)
        self._compare(what, [board.noted(name) for name in keys])

    def _compare(self, what: str, entries: Sequence[str | None]) -> None:
        """Raise if another process does something else."""
        for process, found in enumerate(entries):
            if found not in (None, what):
                raise _alone(f"{what} is called on {self._name}, {found} on {self._transport.describe(process)}.")

    def _look_for(self, what: str, keys: Sequence[str], before: dict[int, str | None]) -> dict[int, str | None]:
        """Raise if all that have not come wait for something else, and did so at the last look.

        What a process notes has the time in it: the note of one that goes on again, or cannot, does not change.

        Args:
            what: as users call it.
            keys: under which the processes enter that they come.
            before: what was noted at the last look.
        """
        board = self._board
        missing = [process for process in self._processes if board.noted(keys[process]) is None]
        if missing and self._gone():
            raise _alone(f"{what} is called on {self._name} after another process has ended.")
        waits = {process: board.noted(f"waits/{process}") for process in missing}
        if waits and all(note and before.get(process) not in (None, "", note) for process, note in waits.items()):
            where = "; ".join(f"{self._transport.describe(process)} {note}" for process, note in waits.items())
            raise _alone(f"{what} is called on {self._name}, and not on all others: {where}.")
        return waits


def _alone(text: str) -> CollectiveError:
    hint = "Call it on all processes, outside of `if trainer.is_global_zero:` and the like."
    return CollectiveError(f"{text[0].upper()}{text[1:]}", hint=hint)
