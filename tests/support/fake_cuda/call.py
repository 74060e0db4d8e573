"""Calls functions in a process that has the fake device, from tests whose own process has none."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.support.fake_cuda.environment import ROOT, environment, hazards, note_hazards


class RehearsalError(Exception):
    """The function has failed, or its process was killed."""


def rehearse(fn: Callable[..., Any], *arguments: Any, protects: bool = False, timeout: float = 90, **given: Any) -> Any:
    """The result of a function on two fake devices.

    One process calls all functions, as its start takes longer than most of them. It ends when a function fails.

    Args:
        fn: at the top level of a module; it, its arguments and its result pickle.
        *arguments: of the function.
        protects: whether code of the host that touches device memory ends the process.
        timeout: seconds after which all of them are killed.
        **given: of the function.

    Raises:
        RehearsalError: it has failed, or pinned memory was changed too early.
    """
    if protects not in _STARTED:
        _STARTED[protects] = _Rehearsal(protects)
    try:
        result, found = _STARTED[protects].call(fn, arguments, given, timeout)
    except BaseException:  # a test that times out leaves its result under way, which the next one would take
        _STARTED.pop(protects).end()
        raise
    if found:
        raise RehearsalError(f"hazards: {found}")
    return result


class _Rehearsal:
    """The process, and all that it starts."""

    def __init__(self, protects: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.log = Path(self.folder.name) / "output"
        self.connection, theirs = Pipe()
        with self.log.open("w") as output, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=environment(2, protects=protects, record=Path(self.folder.name)),
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, fn: Callable[..., Any], arguments: Any, given: Any, timeout: float) -> tuple[Any, list[str]]:
        """The result, and what was hazardous meanwhile."""
        begun = self.log.stat().st_size
        self.connection.send_bytes(pickle.dumps((fn, arguments, given)))
        if not self.connection.poll(timeout):
            raise RehearsalError(f"{fn.__qualname__} was not done within {timeout:g} s")
        try:
            result, failed = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            failed = f"ended with code {self.process.wait()}"
        output = self.log.read_text(errors="replace")[begun:]
        print(output)
        if failed:
            raise RehearsalError(f"{fn.__qualname__} {failed}: {output[-3000:]}")
        return result, hazards(Path(self.folder.name))

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.folder.cleanup()


_STARTED: dict[bool, _Rehearsal] = {}
"""By whether it protects the memory of the devices."""


@atexit.register
def _end_all() -> None:
    for each in _STARTED.values():
        each.end()


def main(descriptor: int) -> None:
    """Call what comes until nothing more comes."""
    import torch

    connection: Connection[bytes, bytes] = Connection(descriptor)
    begun = False
    with suppress(EOFError):
        while True:
            result = failed = None
            fn, arguments, given = pickle.loads(connection.recv_bytes())
            if not begun and "lightning.pytorch" in sys.modules:
                from tests.support.processes import serve_copies

                serve_copies()  # now that it is imported, and before anything runs
            begun = True
            try:
                result = fn(*arguments, **given)
            except Exception:
                failed = f"raised: {traceback.format_exc()}"
            note_hazards()
            torch.cuda.set_device(0)
            sys.stdout.flush()
            connection.send_bytes(pickle.dumps((result, failed)))
    # autograd's device threads may ask for the interpreter while it ends, and then the process aborts
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
