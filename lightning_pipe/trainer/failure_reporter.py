"""One process of a run prints why the run has failed; the other processes end without printing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_pipe.trainer.children import is_child
from lightning_pipe.trainer.launcher import leave_quietly
from lightning_pipe.transport.failures.board import FailureBoard

_PATIENCE = 15.0
"""Seconds that a child leaves to process 0, whose hooks for exceptions may be slow."""


def report_once(error: BaseException, board: FailureBoard, *, started: bool) -> None:
    """Let this process end without printing its error if another one prints the reason.

    Processes that something else than Lightning has started have outputs of their own: each prints its error.

    Args:
        error: with which this process ends.
        board: where failures are reported.
        started: whether this process has started the others.
    """
    if is_child():
        with _ignoring_termination():
            first = board.becomes_reporter(_PATIENCE)
        if not first:
            leave_quietly(error)
    elif started and board.transport.process == 0 and not board.becomes_reporter():
        leave_quietly(error)


@contextmanager
def _ignoring_termination() -> Iterator[None]:
    """The end of process 0 terminates its children, which may have to print the reason in its place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
