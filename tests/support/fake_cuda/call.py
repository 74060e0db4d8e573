"""Calls a function in a process that has the fake device, from a test whose own process has none."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.fake_cuda.environment import ROOT, environment, hazards


class RehearsalError(Exception):
    """The function has failed, or its process was killed."""


def rehearse(
    fn: Callable[..., Any], *arguments: Any, devices: int = 1, protects: bool = False, timeout: float = 90, **given: Any
) -> Any:
    """The result of a function on the fake device.

    Args:
        fn: at the top level of a module; it, its arguments and its result pickle.
        *arguments: of the function.
        devices: how many devices its process and all that it starts have.
        protects: whether code of the host that touches device memory ends the process.
        timeout: seconds after which all of them are killed.
        **given: of the function.

    Raises:
        RehearsalError: it has failed, or pinned memory was changed too early.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((fn, arguments, given)))
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            cwd=ROOT,
            env=environment(devices, protects=protects, record=folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise RehearsalError(f"{fn.__qualname__} was not done within {timeout:g} s") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        print(output)
        if process.returncode:
            raise RehearsalError(f"{fn.__qualname__} ended with code {process.returncode}: {output[-3000:]}")
        if found := hazards(folder):
            raise RehearsalError(f"hazards: {found}")
        return pickle.loads((folder / "result").read_bytes())


def main(name: str) -> None:
    folder = Path(name)
    fn, arguments, given = pickle.loads((folder / "call").read_bytes())
    (folder / "result").write_bytes(pickle.dumps(fn(*arguments, **given)))
    # autograd's device threads may ask for the interpreter while it ends, and then the process aborts
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
