"""What the processes of one job share, and what a job must leave behind clean for the next one of a sweep.

Lightning starts the other processes of a job by running the first one's command line again. In a sweep that command
line describes the whole sweep (``-m trainer.devices=2,3``), and by itself every process would make an output folder of
its own. So the first process leaves its job's own overrides and output folder in the environment, and the others take
them from there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

JOB = "LIGHTNING_PIPE_RECIPE_JOB"
GRACE = 3.0  # seconds that the others may go on for when the first process has failed
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def rank() -> int:
    """The number of this process in its job as the launcher has told it: 0 where nothing has been said."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def arguments(command_line: Sequence[str]) -> list[str]:
    """What Hydra shall read in this process.

    Args:
        command_line: what this process was started with, without the program's name.

    Returns:
        on the first process of a job the command line itself; on the others the first one's own overrides where it
        has left them, and no output of their own.
    """
    # "+experiment=" is what Hydra asks for where a group is not in the defaults list; here it is.
    given = [word.replace("+experiment=", "experiment=", 1) if word.startswith("+") else word for word in command_line]
    if rank() == 0:
        return given
    quiet = ["hydra.output_subdir=null", "hydra.job_logging.root.level=WARNING"]
    if JOB in os.environ:
        job = json.loads(os.environ[JOB])
        return [*job["overrides"], f"hydra.run.dir={_quoted(job['output'])}", *quiet]
    # Started from outside (torchrun, SLURM): rank 0's folder is not known here, and nothing is written to another.
    no_file = "hydra.job_logging.root.handlers=[console]"
    return [*given, "hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=.", no_file, *quiet]


def _quoted(path: str) -> str:
    return "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"


@dataclass
class Job:
    """One job under way.

    Args:
        launcher: what has started the job's other processes, once it is known.
    """

    launcher: object | None = None

    @property
    def children(self) -> list[subprocess.Popen[bytes]]:
        """The processes that this one has started; empty where something else starts them."""
        return getattr(self.launcher, "procs", [])

    def end(self, *, failed: bool, seconds: float = 30.0) -> None:
        """Waits for the children; after a failure it does not wait long."""
        # Lightning's observer, a thread, would find a child that failed or was ended here, and kill this process.
        children = list(self.children)
        self.children.clear()
        if failed:  # most end by themselves when they hear of it; a signal would cut short what they have to say
            deadline = time.monotonic() + GRACE
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            if child.poll() is None and failed:
                child.terminate()
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
            if code != 0 and not failed:
                log.warning("Process %d of this job ended with exit code %d.", child.pid, code)


@contextlib.contextmanager
def job(overrides: Sequence[str], output: str, threads: int | None) -> Iterator[Job]:
    """Frames one job: the others learn of it, and afterwards no process, group or variable of it remains.

    Args:
        overrides: the job's own overrides, a sweep's choices resolved.
        output: the job's output folder.
        threads: threads per process; None leaves it to torch.
    """
    import torch.distributed

    before = dict(os.environ)
    if rank() == 0:
        os.environ[JOB] = json.dumps({"overrides": list(overrides), "output": output})
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Lightning's launcher would set another number
        torch.set_num_threads(threads)
    current, failed = Job(), True
    try:
        yield current
        failed = False
    finally:
        current.end(failed=failed, seconds=5.0 if failed else 60.0)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def from_command_line() -> None:
    """Replaces this process's command line by `arguments`."""
    sys.argv[1:] = arguments(sys.argv[1:])
