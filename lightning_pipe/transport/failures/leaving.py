"""The last words of a process of a run, and its end from any thread."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from contextlib import suppress


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
