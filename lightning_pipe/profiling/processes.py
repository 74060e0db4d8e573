"""Starts the processes that measure together, and ends them."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import active_children, get_context
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipe.errors import CommunicationError, ConfigurationError, PipeError
from lightning_pipe.text import several
from lightning_pipe.transport.arrangement import open_transport
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology

Job = Callable[[Transport], Any]


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
    others = set(active_children())
    pool = ProcessPoolExecutor(ranks, get_context("spawn"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            calls = [pool.submit(_work, job, process, ranks, device, folder, timeout) for process in range(ranks)]
            done, late = wait(calls, timeout, FIRST_EXCEPTION)
            for call in done:
                if (error := call.exception()) is not None:
                    raise _told(error) from error
            if late:
                raise CommunicationError(f"The measurement was not done within {timeout:g} s.")
            return calls[0].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.kill()
            process.join()


def _check(ranks: int, device: str) -> None:
    if ranks < 1:
        raise ConfigurationError(f"At least one process measures, not ranks={ranks}.")
    if device == "cuda" and ranks > (found := torch.cuda.device_count()):
        raise ConfigurationError(
            f"A GPU for each of {several(ranks, 'rank')} is needed, and this machine has {found}.",
            hint='Measure on the CPU: device="cpu".' if not found else f"Use {several(found, 'rank')} or fewer.",
        )


def _told(error: BaseException) -> PipeError:
    if isinstance(error, PipeError):
        return error
    if isinstance(error, BrokenProcessPool):
        return CommunicationError(f"A process that measured has died: {error}")
    return ConfigurationError(
        f"The module or its batch cannot be sent to other processes: {error}.",
        hint="Use `lightning-pipe profile package.module:Name`, whose processes make it themselves.",
    )


def _work(job: Job, process: int, ranks: int, device: str, folder: str, timeout: float) -> Any:
    """One process; what fails in somebody's code is told with its place."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(given) if given.isdigit() else max(1, (os.cpu_count() or 1) // ranks))
    place, limit = torch.device(device, process) if device == "cuda" else torch.device(device), timedelta(0, timeout)
    if device == "cuda":
        torch.cuda.set_device(place)
    if ranks > 1:
        backend, meeting = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", f"file://{folder}/meeting"
        dist.init_process_group(backend, init_method=meeting, rank=process, world_size=ranks, timeout=limit)
    transport = open_transport(Topology(ranks), place, limit)
    try:
        found = job(transport)
    except PipeError:
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        raise CommunicationError(
            f"A process that measured failed with {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error
    if ranks > 1:
        transport.barrier()
    transport.close()
    if ranks > 1:
        dist.destroy_process_group()
    return found
