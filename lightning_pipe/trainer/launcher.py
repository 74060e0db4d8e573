"""Starts the other processes of a run as Lightning does, and lets none of them outlive the first one."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import override

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.lightning_internals import SubprocessLauncher, set_threads
from lightning_pipe.trainer.connect import RUN
from lightning_pipe.trainer.signals import leaving_with_others
from lightning_pipe.transport.failures import leave, tell

CHILD = "LIGHTNING_PIPE_CHILD"
"""The variable by which a process knows who has started it."""

_PR_SET_PDEATHSIG = 1
_WELL = (None, 0, 128 + signal.SIGTERM)
"""Codes that are no failure: all end when one is asked to, and the first process may still be writing a checkpoint."""
_GLANCE = 0.5
_NOTICING = 6.0
"""Seconds that the first process gets to notice, and to end by itself, when another one has failed."""
_AFTER_FAILURE, _AFTER_SUCCESS = 3.0, 30.0
"""Seconds that the others get to end by themselves when the first one ends."""


class ScriptLauncher(SubprocessLauncher):
    """Runs this script again for every other process of the node."""

    _failed = False  # the last run of this process, whichever launcher it had

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a session that has no script can use it: no other process would run one."""
        return self.num_processes * self.num_nodes == 1

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        set_threads(num_processes=self.num_processes)
        ScriptLauncher._failed = True  # until it has come to its end
        with leaving_with_others(trainer):
            result = function(*args, **kwargs)
            trainer.strategy.world.finish()
        ScriptLauncher._failed = False
        return result

    @override
    def _call_children_scripts(self) -> None:
        _check_sweep()
        if self.num_nodes == 1:  # every node has a launcher, and nobody tells the others a number
            os.environ[RUN] = uuid.uuid4().hex
        os.environ[CHILD] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[CHILD]
        threading.Thread(target=observe, args=(self.procs,), daemon=True).start()
        atexit.register(self._end_with_others, os.getpid())

    def _end_with_others(self, owner: int) -> None:
        """At the end of this process: the others tell their errors, and finish what the script has behind the run."""
        if os.getpid() != owner:  # this is a copy of the process, which has started none
            return
        failed = self._failed or hasattr(sys, "last_value")  # the error that has ended this process
        end_all(self.procs, _AFTER_FAILURE if failed else _AFTER_SUCCESS)
        if not failed and (lost := _lost(self.procs)):
            tell(lost)
            leave(1)


def observe(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """In a thread: end this process and those that it has started when one of them has failed.

    Lightning's observer does so without giving this process the time to say why, and to end with a code of its own.
    """
    while not _lost(processes):
        time.sleep(_GLANCE)
    time.sleep(_NOTICING)
    tell(f"{_lost(processes)} All processes of this host end.")
    end_all(processes, 0.0)
    leave(1)


def end_all(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Wait for processes, and kill those that are left after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()  # nothing, if it has ended


def _lost(processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Which of them have failed, in words."""
    codes = {rank: process.poll() for rank, process in enumerate(processes, 1)}
    failed = {rank: code for rank, code in codes.items() if code not in _WELL}
    return " ".join(f"Process {rank} of this host has ended with code {code}." for rank, code in failed.items())


def end_with_parent() -> None:
    """In a process that a launcher has started: end when the one that has started it ends, in whatever way."""
    if not os.environ.get(CHILD):
        return
    if sys.platform == "linux":
        # SIGKILL: Python does not act on other signals while the main thread waits in C++
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[CHILD]):
            tell(f"This process ends: the one that has started it (PID {os.environ[CHILD]}) has gone.")
            leave(1)
    # The interpreter's last collection goes through every object of torch and Lightning: 1.2 s of 6 (Python 3.11). The
    # first process waits for this one, and a machine that many processes share makes it ten seconds.
    atexit.register(gc.freeze)


def _check_sweep() -> None:
    """Refuse to start other processes from a job of a sweep: Lightning (2.6) would have each run all of the sweep.

    Raises:
        ConfigurationError: this is one of the jobs of a sweep of Hydra's.
    """
    if "hydra" not in sys.modules:
        return
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise ConfigurationError(
            "A sweep of Hydra's cannot start the processes of a pipeline: each of them would run the whole sweep.",
            hint="Start the sweep with torchrun, which starts all processes once: torchrun --standalone "
            "--nproc-per-node 2 train.py -m … for devices=2. Or run its jobs one by one, without -m.",
        )
