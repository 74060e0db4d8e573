"""Starts the processes that measure together, and ends them."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from lightning_pipe.errors import CommunicationError, ConfigurationError, PipeError
from lightning_pipe.text import several
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.choose import open_transport
from lightning_pipe.transport.topology import Topology

Job = Callable[[Transport], Any]
_ERROR = "error"


def in_processes(job: Job, ranks: int, device: str, timeout: float) -> Any:
    """Call ``job(transport)`` in one process per rank of one pipeline on this machine; the result is rank 0's.

    Args:
        job: picklable, and so is what it returns.
        ranks: number of processes.
        device: ``"cpu"``, or ``"cuda"``: each process has a GPU of its own.
        timeout: seconds after which all are killed.

    Raises:
        ConfigurationError: there is no rank, or no GPU for each, or the job cannot be sent to other processes.
        PipeError: what a process has raised.
        CommunicationError: a process failed, or they were not done in time.
    """
    _check(ranks, device)
    threads = _threads(ranks)
    with tempfile.TemporaryDirectory() as folder:
        try:
            call = pickle.dumps(job)
        except Exception as error:
            raise ConfigurationError(
                f"The module or its batch cannot be sent to other processes: {error}.",
                hint="Use `lightning-pipe profile package.module:Name`, whose processes make it themselves.",
            ) from error
        context = spawn(  # type: ignore[no-untyped-call]
            partial(_child, ranks=ranks, device=device, threads=threads, folder=folder, call=call, timeout=timeout),
            nprocs=ranks,
            join=False,
            daemon=True,
        )
        try:
            # One join per end of a process: it says whether all have ended.
            while not context.join(timeout=timeout):
                if all(process.is_alive() for process in context.processes):
                    raise CommunicationError(f"The measurement was not done within {timeout:g} s.")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _reason(Path(folder), error) from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return pickle.loads((Path(folder) / "result").read_bytes())


def _check(ranks: int, device: str) -> None:
    if ranks < 1:
        raise ConfigurationError(f"At least one process measures, not ranks={ranks}.")
    if device == "cuda" and ranks > (found := torch.cuda.device_count()):
        raise ConfigurationError(
            f"A GPU for each of {several(ranks, 'rank')} is needed, and this machine has {found}.",
            hint='Measure on the CPU: device="cpu".' if not found else f"Use {several(found, 'rank')} or fewer.",
        )


def _reason(folder: Path, error: Exception) -> PipeError:
    """What the process that failed first has left to say; ``error`` has its traceback."""
    left = sorted(folder.glob(f"{_ERROR}*"), key=lambda path: path.stat().st_mtime_ns)
    if not left:
        return CommunicationError(f"A process that measured failed: {error}")
    found: PipeError = pickle.loads(left[0].read_bytes())
    return found


def _threads(ranks: int) -> int:
    """The threads that Lightning gives to each process."""
    given = os.environ.get("OMP_NUM_THREADS")
    return int(given) if given and given.isdigit() else max(1, (os.cpu_count() or 1) // ranks)


def _child(process: int, *, ranks: int, device: str, threads: int, folder: str, call: bytes, timeout: float) -> None:
    try:
        _work(process, ranks, device, threads, Path(folder), pickle.loads(call), timedelta(seconds=timeout))
    except Exception as error:
        own = error if isinstance(error, PipeError) else CommunicationError(_told(error))
        written = Path(folder) / f"writing{process}"
        written.write_bytes(pickle.dumps(own))
        written.rename(Path(folder) / f"{_ERROR}{process}")
        raise


def _told(error: Exception) -> str:
    """The error of somebody's code, and where."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"A process that measured failed with {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _work(process: int, ranks: int, device: str, threads: int, folder: Path, job: Job, limit: timedelta) -> None:
    torch.set_num_threads(threads)
    place = torch.device(device, process) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    if ranks > 1:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=process, world_size=ranks, timeout=limit
        )
    transport = open_transport(Topology(ranks), place, limit)
    found = job(transport)
    if process == 0:
        (folder / "result").write_bytes(pickle.dumps(found))
    if ranks > 1:
        transport.barrier()
    transport.close()
    if ranks > 1:
        dist.destroy_process_group()
