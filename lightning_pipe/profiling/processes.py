"""Starts the processes that measure together, and ends them."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from lightning_pipe.errors import CommunicationError, ConfigurationError
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.choose import open_transport
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
        ConfigurationError: the job cannot be sent to other processes.
        CommunicationError: a process failed, or they were not done in time.
    """
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
            raise CommunicationError(f"A process that measured failed: {error}") from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return pickle.loads((Path(folder) / "result").read_bytes())


def _threads(ranks: int) -> int:
    """The threads that Lightning gives to each process."""
    given = os.environ.get("OMP_NUM_THREADS")
    return int(given) if given and given.isdigit() else max(1, (os.cpu_count() or 1) // ranks)


def _child(process: int, *, ranks: int, device: str, threads: int, folder: str, call: bytes, timeout: float) -> None:
    torch.set_num_threads(threads)
    limit = timedelta(seconds=timeout)
    place = torch.device(device, process) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    if ranks > 1:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=process, world_size=ranks, timeout=limit
        )
    transport = open_transport(Topology(ranks), place, limit)
    job: Any = pickle.loads(call)
    found = job(transport)
    if process == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(found))
    if ranks > 1:
        transport.barrier()
    transport.close()
    if ranks > 1:
        dist.destroy_process_group()
