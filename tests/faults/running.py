"""Runs the script with a fault and judges how it ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.catalogue import Fault
from tests.faults.files import damaged, prepare
from tests.support.processes import forkserver

_MARK = "LIGHTNING_PIPE_FAULT"
_PR_SET_CHILD_SUBREAPER = 36
STARTING = 240.0
"""Seconds in which the processes must come to the fault: several import torch at the same time."""
LEAVING = 10.0
"""Seconds within which the others must have gone when process 0 has."""


@dataclass
class Ended:
    """How a run has ended.

    Args:
        fault: what happened to it.
        seconds: from the fault to the end of the last process; ``None``: the fault never happened.
        codes: exit codes by process; ``None`` where a process had to be killed by the campaign.
        outputs: by process.
        left: processes that were still there.
        files: what is left of temporary files.
        damaged: checkpoints that are there and not complete, or should be there.
    """

    fault: Fault
    seconds: float | None = None
    codes: dict[int, int | None] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def tellers(self) -> dict[int, int]:
        """How often each process has printed the reason."""
        if not self.fault.told:
            return {}
        counts = {number: len(re.findall(self.fault.told, text)) for number, text in self.outputs.items()}
        return {number: count for number, count in counts.items() if count}

    def problems(self) -> list[str]:
        """What is not as required."""
        fault, found = self.fault, []
        if self.seconds is None:
            found.append("the fault did not happen")
        elif self.seconds > fault.within:
            found.append(f"ended after {self.seconds:.0f} s")
        if self.left:
            found.append(f"left behind: processes {self.left}")
        if self.files:
            found.append(f"left behind: {', '.join(self.files)}")
        if self.damaged:
            found.append(f"damaged: {', '.join(self.damaged)}")
        return [*found, *self._wrong_codes(), *self._wrong_words()]

    def _wrong_words(self) -> list[str]:
        fault, found = self.fault, []
        if fault.told and not self.tellers:
            found.append("no reason told")
        if fault.each and len(self.tellers) < fault.processes:
            found.append("not told by each process")
        everything = "\n".join(self.outputs.values())
        if fault.untold and (told := re.search(fault.untold, everything)):
            found.append(f"{told[0]} is told")
        if "terminate called" in everything:
            found.append("a crash")
        if fault.success and everything.count("The run has succeeded.") != fault.processes:
            found.append("no success")
        return found

    def _wrong_codes(self) -> list[str]:
        fault = self.fault
        mine = self.codes.get(0)
        wrong = mine not in fault.codes if fault.codes is not None else mine in (0, None)
        found = [f"process 0 ended with code {mine}"] if wrong else []
        # a child that has done its work may be ended by the end of process 0
        good = (0, -signal.SIGTERM)
        for number, code in self.codes.items():
            if number and number not in self.left and (code not in good if fault.success else code == 0):
                found.append(f"process {number} ended with code {code}")
        return found


class Copy:
    """Process 0 as a copy of one that has the libraries, on whose import a fresh one spends ten seconds."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self._process = forkserver().Process(target=_script, args=(words, environment), daemon=False)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As that of `subprocess.Popen`; so are the methods."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _script(words: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(words[0])
    sys.argv[1:] = words
    try:
        runpy.run_module("tests.faults.script", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


def run(fault: Fault, *, copied: bool = False) -> Ended:
    """Run the script with a fault; nothing of it is left afterwards. ``copied``: process 0 is a `Copy`."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of the campaign
    with tempfile.TemporaryDirectory(prefix="lightning-pipe-fault-") as name:
        folder, mark = Path(name), uuid.uuid4().hex
        (folder / "tmp").mkdir()
        prepare(folder / "resume_from.ckpt", fault.options.get("resume"))
        root = str(Path(__file__).parents[2])
        left_out = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LIGHTNING_PIPE_CHILD")
        environment = {key: value for key, value in os.environ.items() if key not in left_out}
        environment |= {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), _MARK: mark}
        words = {"kind": fault.kind, "phase": fault.phase, "process": fault.process, "processes": fault.processes}
        options = json.dumps({**words, "timeout": fault.timeout, **fault.options})
        command = [sys.executable, "-m", "tests.faults.script", name, options]
        fresh = {"env": environment, "cwd": name, "start_new_session": True, "stdin": subprocess.DEVNULL}
        first = Copy(command[3:], environment) if copied else subprocess.Popen(command, **fresh)  # type: ignore[call-overload]
        try:
            return _watch(fault, first, folder, mark)
        finally:
            for pid in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            first.kill()
            first.wait()
            _reap(folder)


def _watch(fault: Fault, first: subprocess.Popen[bytes] | Copy, folder: Path, mark: str) -> Ended:
    _wait(fault, first, folder, mark)
    happened = _moment(folder)
    ended = Ended(fault, None if happened is None else time.time() - happened)
    pids = _pids(folder)
    ended.left = sorted(pids.get(pid, -1) for pid in _marked(mark))
    for pid in _marked(mark):
        os.kill(pid, signal.SIGKILL)
    alive_first = first.returncode is None
    first.kill()
    first.wait()
    deadline = time.time() + 2.0
    while time.time() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        _reap(folder)  # dying, or not taken over yet
        time.sleep(0.05)
    for number in range(fault.processes):
        log, code = folder / f"output{number}", folder / f"code{number}"
        ended.outputs[number] = log.read_text(errors="replace") if log.exists() else ""
        if log.exists():
            ended.codes[number] = int(code.read_text()) if code.exists() and number not in ended.left else None
    ended.codes[0] = None if alive_first else first.returncode
    ended.files = [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("lightning-pipe")]
    ended.damaged = damaged(folder / "saved", fault)
    return ended


def _wait(fault: Fault, first: subprocess.Popen[bytes] | Copy, folder: Path, mark: str) -> None:
    """Return when all processes have ended, or have had the time for it."""
    start = time.time()
    over: float | None = None
    while True:
        time.sleep(0.2)
        _reap(folder)
        alive, happened = _marked(mark), _moment(folder)
        importing = bool(alive) and len(list(folder.glob("ready*"))) < len(list(folder.glob("pid*")))
        if first.poll() is not None:
            over = None if importing else over or time.time()
            if not alive or (over is not None and time.time() - over > LEAVING):
                return
        if time.time() > (start + STARTING if happened is None or importing else happened + fault.within + 5):
            return


def _moment(folder: Path) -> float | None:
    """When the fault happened first; a process that still imports torch cannot notice it before."""
    moments = [float(text) for path in folder.glob("fault*") if (text := path.read_text())]
    return max(min(moments), *(path.stat().st_mtime for path in folder.glob("ready*"))) if moments else None


def _pids(folder: Path) -> dict[int, int]:
    """The processes that have begun, with their numbers."""
    return {int(text): int(path.name[3:]) for path in folder.glob("pid*") if (text := path.read_text())}


def _reap(folder: Path) -> None:
    """Take the exit codes of orphans."""
    for pid, number in _pids(folder).items():
        if number == 0:
            continue
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                (folder / f"code{number}").write_text(str(os.waitstatus_to_exitcode(status)))


def _marked(mark: str) -> list[int]:
    """The living processes of a run."""
    word = f"{_MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
    return found
