"""Starts small worlds of processes for tests: quickly, bounded in time, and without leaving anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver as server
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.topology import Topology

_Name = TypeVar("_Name")
# A fresh process spends seconds on these imports, a forked child of a server that has them a fraction of one.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torchmetrics",
    "lightning.pytorch",
    "lightning_pipe.trainer.strategy",
    "pytest",
    "hypothesis",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.bart.modeling_bart",
    "tests.support.processes",
    "tests.support.trainer_runs",
    "tests.support.frozen",
]
# How long the others may go on once one process has failed.
GRACE = 10.0


@dataclass
class Outcome:
    """How one process ended.

    Args:
        process: its number.
        value: what the function returned.
        error: what it raised, or what stands for a process that was killed.
        trace: the traceback as text.
        output: what it printed.
        seconds: from the start of the world to its end.
    """

    process: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    output: str = ""
    seconds: float = 0.0


class WorldTimeoutError(Exception):
    """A world was not done in time; its processes were killed."""


class ProcessDiedError(Exception):
    """A process ended without an answer."""


def run_world(fn: Callable[..., Any], world_size: int, **options: Any) -> list[Any]:
    """Call ``fn(process)`` in ``world_size`` processes with a default group and return the results; see `outcomes`.

    Raises:
        BaseException: the error of the process that failed first, with its traceback as a note.
        WorldTimeoutError: not done in time; the note says where each process was.
    """
    return results(outcomes(fn, world_size, **options))


def run_pipeline(fn: Callable[..., Any], topology: Topology, **options: Any) -> list[Any]:
    """Call ``fn(transport)`` in one process per place of the topology; the twin of `run_threads`."""
    return results(pipeline_outcomes(fn, topology, **options))


def pipeline_outcomes(
    fn: Callable[..., Any],
    topology: Topology,
    *,
    timeout: float = 60.0,
    group_timeout: float = 15.0,
    local: bool = True,
    **kwargs: Any,
) -> list[Outcome]:
    """As `run_pipeline`, but says how each process ended instead of raising.

    ``local=False`` sends all messages over Gloo, as between hosts; ``kwargs`` are passed on, the others see `outcomes`.
    """
    call = (fn, topology, group_timeout, local, kwargs)
    return outcomes(_with_transport, topology.world_size, timeout=timeout, group_timeout=group_timeout, call=call)


def run_trainers(fn: Callable[..., Any], world_size: int, *, timeout: float = 90.0, **kwargs: Any) -> list[Any]:
    """Call ``fn(process, **kwargs)`` in processes that Lightning takes for its own; each builds its own Trainer.

    Only the environment variables of Lightning's launcher are set; the Trainer initialises torch.distributed.
    """
    return results(outcomes(fn, world_size, timeout=timeout, group_timeout=None, **kwargs))


def in_turn(
    calls: Mapping[_Name, Callable[[int], Any]], world_size: int, run: Callable[..., list[Any]] | None = None
) -> dict[_Name, list[Any]]:
    """By name what ``call(process)`` returns in each process: calls one behind the other in one world.

    Args:
        calls: partial functions of the top level of a module; they must pickle.
        world_size: number of processes.
        run: `run_trainers` by default.
    """
    seconds = 60.0 + 10.0 * len(calls)
    found = (run or run_trainers)(_each, world_size, timeout=seconds, calls=list(calls.values()))
    return dict(zip(calls, map(list, zip(*found, strict=True)), strict=True))


def _each(process: int, calls: Sequence[Callable[[int], Any]]) -> list[Any]:
    return [call(process) for call in calls]


def refusals(
    call: Callable[..., Any], world_size: int, cases: Iterable[_Name], **kwargs: Any
) -> dict[_Name, list[BaseException | None]]:
    """By case what ``call(process, case, **kwargs)`` raises in each process: Trainers go on behind another's error."""
    return in_turn({case: partial(_raised, call=partial(call, **kwargs), case=case) for case in cases}, world_size)


def _raised(process: int, call: Callable[..., Any], case: Any) -> BaseException | None:
    try:
        call(process, case)
    except BaseException as error:
        return _portable(error)
    return None


def results(ended: list[Outcome]) -> list[Any]:
    """The values of all processes; raises the error of the one that failed first."""
    failed = [outcome for outcome in ended if outcome.error is not None]
    for outcome in ended:
        if outcome.output:
            print(f"--- process {outcome.process} ---\n{outcome.output}")
    if failed:
        failed.sort(key=lambda outcome: (_remoteness(outcome.error), outcome.seconds))
        assert failed[0].error is not None
        for outcome in failed:
            failed[0].error.add_note(f"In process {outcome.process} of {len(ended)}:\n{outcome.trace}")
        raise failed[0].error
    return [outcome.value for outcome in ended]


def _remoteness(error: BaseException | None) -> int:
    """How far an error is from the cause: broken connections are mostly the consequence of another process's error."""
    if isinstance(error, WorldTimeoutError):
        return 3
    if isinstance(error, CommunicationError) or "by peer" in str(error):
        return 2
    return int(isinstance(error, ProcessDiedError))


def outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *,
    timeout: float = 60.0,
    group_timeout: float | None = 15.0,
    group_backend: str = "gloo",
    **kwargs: Any,
) -> list[Outcome]:
    """As `run_world`, but says how each process ended instead of raising.

    Args:
        fn: a function at the top level of a module.
        world_size: number of processes.
        timeout: seconds after which everything is killed.
        group_timeout: seconds after which a collective fails; ``None``: no process group.
        group_backend: that of the default group. A second one, on the same port, could meet the store of the first.
        **kwargs: passed on; they must pickle.
    """
    group = None if group_timeout is None else (group_backend, group_timeout)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        children = [_Child(process, world_size, port, Path(folder), group, fn, kwargs) for process in range(world_size)]
        try:
            return _collect(children, timeout)
        finally:
            for child in children:
                child.kill()


def forkserver() -> ForkServerContext:
    """Starts processes that have the libraries, on whose import fresh ones spend seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def serve_copies() -> None:
    """Start the server of `forkserver` as a copy of this process, which has most of the libraries, and its tests."""
    resource_tracker.ensure_running()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0lightning-pipe-tests-%d" % os.getpid())
    listener.listen()
    alive, held = os.pipe()
    running = server._forkserver  # type: ignore[attr-defined]
    running._forkserver_address, running._forkserver_alive_fd = listener.getsockname(), held
    running._forkserver_pid = os.fork()
    if not running._forkserver_pid:
        _serve(listener.detach(), alive)
    listener.close()
    os.close(alive)


def _serve(listener: int, alive: int) -> NoReturn:
    faulthandler.disable()
    # Loggers that were made while tests were collected write to what pytest captures.
    for logger in map(logging.getLogger, [None, *logging.root.manager.loggerDict]):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") in (sys.stdout, sys.stderr):
                handler.setStream(sys.__stderr__)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # what else writes there must not find a number of pytest's files in use again
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in (0, 1, 2, listener, alive, nothing):
            os.dup2(nothing, number, inheritable=False)
    try:
        from tests.support.warm_up import warm_up

        warm_up()
        server.main(listener, alive, PRELOAD)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def free_port() -> int:
    """A port of this host that nobody uses, below those that the system gives to others in the meantime."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class _Child:
    """One process of a world, seen from the test."""

    def __init__(
        self,
        process: int,
        world_size: int,
        port: int,
        folder: Path,
        group: tuple[str, float] | None,
        fn: Callable[..., Any],
        kwargs: dict[str, Any],
    ) -> None:
        context = forkserver()
        self.number = process
        self.log = folder / f"{process}.log"
        self.log.touch()
        self.receiver, sender = context.Pipe(duplex=False)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "RANK": str(process),
            "LOCAL_RANK": str(process),
            "NODE_RANK": "0",
        }
        arguments = (sender, environment, str(self.log), group, pickle.dumps((fn, kwargs)))
        self._process: ForkServerProcess = context.Process(target=_main, args=arguments, daemon=False)
        self._process.start()
        sender.close()
        self.start = time.monotonic()

    def outcome(self) -> Outcome:
        """What the child has sent, or that it has gone."""
        try:
            outcome: Outcome = pickle.loads(self.receiver.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.join(5.0)
            outcome = self.missing(ProcessDiedError(f"Process {self.number} ended with code {self._process.exitcode}."))
        outcome.output = self.log.read_text(errors="replace")
        outcome.seconds = time.monotonic() - self.start
        return outcome

    def missing(self, error: BaseException) -> Outcome:
        """The outcome of a child that has not answered."""
        output = self.log.read_text(errors="replace")
        return Outcome(self.number, error=error, trace=output, output=output, seconds=time.monotonic() - self.start)

    def signal(self, number: int) -> None:
        """Send a signal to the child itself."""
        if self._process.pid is not None and self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End the child and all that it has started."""
        self._process.join(1.0)
        if self._process.pid is not None:
            # The child leads a process group of its own; what it started is in it, even when the child has gone.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join(5.0)
        self.receiver.close()


def _collect(children: list[_Child], timeout: float) -> list[Outcome]:
    running = {child.receiver: child for child in children}
    ended: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    while running and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(running), timeout=left):
            child = running.pop(receiver)  # type: ignore[arg-type]
            ended[child.number] = outcome = child.outcome()
            if outcome.error is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
    for child in running.values():
        child.signal(signal.SIGUSR1)  # asks for the stacks of all threads
    time.sleep(0.5 if running else 0.0)
    for child in running.values():
        error = WorldTimeoutError(f"Process {child.number} was not done within {time.monotonic() - child.start:.0f} s.")
        ended[child.number] = child.missing(error)
    return [ended[child.number] for child in children]


def _main(
    sender: Connection, environment: dict[str, str], log: str, group: tuple[str, float] | None, call: bytes
) -> None:
    """What a child runs."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: go when the fork server goes
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        os.environ.update(environment)
        process = int(environment["RANK"])
        outcome = Outcome(process)
        try:
            outcome.value = _call(process, int(environment["WORLD_SIZE"]), group, call)
        except BaseException as error:
            outcome.trace = "".join(traceback.format_exception(error))
            outcome.error = _portable(error)
        sender.send_bytes(pickle.dumps(outcome))
        sender.close()


def _call(process: int, world_size: int, group: tuple[str, float] | None, call: bytes) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn, kwargs = pickle.loads(call)
    if group is None:
        return fn(process, **kwargs)
    backend, seconds = group
    dist.init_process_group(backend, rank=process, world_size=world_size, timeout=timedelta(seconds=seconds))
    value = fn(process, **kwargs)
    dist.barrier()
    dist.destroy_process_group()
    return value


def _with_transport(process: int, call: tuple[Callable[..., Any], Topology, float, bool, dict[str, Any]]) -> Any:
    import torch

    from lightning_pipe.transport.arrangement import open_transport

    fn, topology, seconds, local, kwargs = call
    transport = open_transport(topology, torch.device("cpu"), timedelta(seconds=seconds), local=local)
    value = fn(transport, **kwargs)
    transport.barrier()
    transport.close()
    return value


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling, else one with the same text."""
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy
