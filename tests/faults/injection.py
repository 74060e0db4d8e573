"""What happens to a process of a run: one method for each kind of fault."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L


class Injection:
    """The fault of this run.

    Args:
        kind: the method to call; another word: the fault has a place of its own in the script.
        phase: where.
        process: on which process; ``None``: on all.
        folder: where the moment of the fault is noted.
    """

    def __init__(self, kind: str, phase: str, process: int | None, folder: Path) -> None:
        self.kind, self.phase, self.process, self.folder = kind, phase, process, folder
        self.number = int(os.environ.get("LOCAL_RANK", "0"))
        self.trainer: L.Trainer | None = None
        self._done = False

    @property
    def here(self) -> bool:
        """Whether the fault happens to this process."""
        return self.process is None or self.process == self.number

    def at(self, phase: str) -> None:
        """The run has come to a phase."""
        if phase == self.phase and self.here and not self._done:
            self._done = True
            self.happens()
            getattr(self, self.kind, lambda: None)()

    def happens(self) -> None:
        """Note the moment."""
        (self.folder / f"fault{self.number}").write_text(str(time.time()))

    def fail(self) -> None:
        """The error that other faults come after."""
        self.happens()
        raise ValueError("an injected fault")

    # ------------------------------------------------------------------ everywhere

    def __getattr__(self, name: str) -> Any:
        if name == "raise":
            return self.fail
        raise AttributeError(name)

    def sys_exit(self) -> None:
        sys.exit(3)

    def os_exit(self) -> None:
        os._exit(7)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupt(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts behind "&" ignore it
        os.kill(os.getpid(), signal.SIGINT)

    def hang(self) -> None:
        while True:
            time.sleep(1)

    def lock(self) -> None:
        # holds the interpreter's lock; nobody ends the first process, which goes on when the others have left
        ctypes.PyDLL(None).sleep(600 if self.number else 35)

    def slow(self) -> None:
        time.sleep(8)

    # ------------------------------------------------------------------ on one process alone

    def should_stop(self) -> None:
        assert self.trainer is not None
        self.trainer.should_stop = True

    def save(self) -> None:
        assert self.trainer is not None
        self.trainer.save_checkpoint(self.folder / "alone.ckpt")

    def barrier(self) -> None:
        assert self.trainer is not None
        self.trainer.strategy.barrier()

    # ------------------------------------------------------------------ resources

    def full_file(self) -> None:
        self.full_folder()

    def full_folder(self) -> None:
        # less than any of the written files has
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def recover(self) -> None:
        """Let files grow again: the output is one."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)

    def descriptors(self) -> None:
        most = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while True:  # fill the gaps
            try:
                os.dup(0)
            except OSError:
                return

    # ------------------------------------------------------------------ while another process fails

    def busy_step(self) -> None:
        time.sleep(15)

    def busy_hook(self) -> None:
        time.sleep(15)

    def busy_folder(self) -> None:
        pass
