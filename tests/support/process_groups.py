"""Runs a command in a process group of its own, of which nothing outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def process_group(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The first process of the group; in the end all that are left are killed.

    Args:
        command: its words.
        **options: of `subprocess.Popen`.
    """
    words = [str(word) for word in command]
    with subprocess.Popen(words, text=True, start_new_session=True, **options) as first:
        try:
            yield first
        finally:
            with suppress(ProcessLookupError):  # nobody is left
                os.killpg(first.pid, signal.SIGKILL)
