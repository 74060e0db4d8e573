"""Threads of the package end before the interpreter does, or end the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from lightning_pipe.transport.failures import joined_threads

STUCK = """
import sys, threading
from lightning_pipe.transport.failures import joined_threads

joined_threads.start("stuck", threading.Event().wait, lambda: None)
print("written")
"""

ENDING = """
import threading
from lightning_pipe.transport.failures import joined_threads

stopped = threading.Event()
joined_threads.start("patient", stopped.wait, stopped.set)
"""


def ended(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)


def test_a_thread_that_does_not_end_ends_the_process() -> None:
    outcome = ended(STUCK)
    assert outcome.returncode == 1
    assert outcome.stdout == "written\n"  # buffered, and written in spite of the hurry


def test_threads_are_joined() -> None:
    assert ended(ENDING).returncode == 0


def test_a_child_that_has_failed_makes_the_process_fail() -> None:
    script = "from lightning_pipe.transport.failures import joined_threads\njoined_threads.fail_at_end(3)"
    assert ended(script).returncode == 3


LEAVING = """
import multiprocessing, time
from lightning_pipe.transport.failures import joined_threads

worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
worker.start()
print(worker.pid, flush=True)
joined_threads.leave(1)
"""


def test_a_process_that_leaves_at_once_leaves_no_worker() -> None:
    # the worker would hold the output open, so that this waited for it
    outcome = ended(LEAVING)
    assert outcome.returncode == 1
    assert int(outcome.stdout)


def test_a_copy_of_the_process_stops_nothing() -> None:
    ended, stopped = threading.Event(), list[int]()

    def wait() -> None:
        ended.wait()

    thread = joined_threads.start("original", wait, lambda: stopped.append(1))
    if (copy := os.fork()) == 0:
        joined_threads.end_all()
        os._exit(len(stopped))
    ended.set()
    thread.join(10.0)
    assert os.waitpid(copy, 0)[1] == 0
