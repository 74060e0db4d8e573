"""Runs a command in a process group of its own, of which nothing outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest


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


def check_gone(first: subprocess.Popen[str], seconds: float) -> None:
    """Fail if a process of the group is left some time after the first one has ended.

    Args:
        first: from `process_group`.
        seconds: to wait for the others.
    """
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError):  # nobody is left
        while time.monotonic() < deadline:
            os.killpg(first.pid, 0)
            time.sleep(0.1)
        pytest.fail("a process is left")
