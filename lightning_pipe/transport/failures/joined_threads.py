"""The threads of this package: none of them is left when the interpreter ends.

A thread that comes back from C++ while the interpreter ends is ended by it in the middle of C++ code, and the process
dies of ``terminate called without an active exception`` after a run without a fault (Python 3.11, torch 2.13).
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

PATIENCE = 2.0
"""Seconds that threads get to end."""

_running: dict[threading.Thread, Callable[[], object]] = {}
_forced: list[int] = []


def start(name: str, body: Callable[[], None], stop: Callable[[], object]) -> threading.Thread:
    """Start a thread that ends before the interpreter does.

    Args:
        name: what it does.
        body: what it runs.
        stop: makes ``body`` return soon; called at the end of the process if the thread is still there.
    """

    def run() -> None:
        try:
            body()
        finally:
            _running.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run, name=f"lightning-pipe {name}", daemon=True)
    _running[thread] = stop
    thread.start()
    return thread


def fail_at_end(code: int) -> None:
    """Let this process end with a code though its own work was done."""
    _forced.append(code)


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


def end_all() -> None:
    """End all threads; the process, too, if one of them does not end: it waits for something that never comes."""
    threads = dict(_running)
    for stop in threads.values():
        stop()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if _forced or any(thread.is_alive() for thread in threads):
        leave(next(iter(_forced), 1))


# a copy of the process has none of the threads, and what stops them would close the connections of the process
os.register_at_fork(after_in_child=_running.clear)
# what is registered first is called last
atexit.register(end_all)
