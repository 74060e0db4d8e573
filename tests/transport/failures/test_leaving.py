"""A process that ends at once has written everything and leaves nobody behind."""

from __future__ import annotations

import subprocess
import sys

LEAVING = """
import multiprocessing, time
from lightning_pipe.transport.failures.leaving import leave

worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
worker.start()
print(worker.pid)
leave(3)
"""


def test_a_process_that_leaves_at_once_leaves_no_worker() -> None:
    # the worker would hold the output open, so that this waited for it
    ended = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 3
    assert int(ended.stdout)  # buffered, and written in spite of the hurry
