"""A stand-in for NCCL, with its rules, over Gloo.

A communicator is one queue, tags do not count, and its first operation holds the host until all members have come. What
is sent is read late, what is received is not there before ``wait``, and sizes must agree. A real ``wait`` lets the
stream wait; this one holds the host as well, without being counted as a wait.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fake_cuda import device

DELAY = "FAKE_NCCL_DELAY"
"""The variable with the longest random delay of an operation, in seconds."""
_LONG = timedelta(seconds=300)
_NUMBERS = itertools.count(1)
_Results = list[tuple[Tensor, Tensor]]


class Options:
    """What torch sets before it makes a group."""

    is_high_priority_stream = False
    _timeout: timedelta | None = None


class Work:
    """An operation in the queue of a communicator."""

    def __init__(self, what: str, run: Callable[[], _Results], timeout: timedelta, stream: int) -> None:
        self._what, self._run, self._timeout, self._stream = what, run, timeout, stream
        self._done = threading.Event()
        self._results: _Results = []
        self._error: Exception | None = None

    def run(self) -> None:
        """Called by the communicator's thread."""
        try:
            self._results = self._run()
        except Exception as error:
            self._error = RuntimeError(f"NCCL (stand-in): {self._what}: {error}")
        del self._run  # and with it what was sent
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            device.SEEN.told("wait", "an operation of NCCL with a limit")
        if not self._done.wait((timeout or self._timeout).total_seconds()):
            raise RuntimeError(f"NCCL (stand-in): {self._what} timed out")
        if self._error is not None:
            raise self._error
        device.SEEN.told("block", id(self), _current_stream())
        with torch.no_grad():
            for target, host in self._results:
                target.copy_(host.pin_memory(), non_blocking=True)
        self._results = []
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class Nccl(dist.ProcessGroup):
    """A communicator."""

    Options = Options
    bound_device_id = None
    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._timeout = options._timeout or _LONG
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=_LONG)
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._opened = False
        self._stream = 500 + next(_NUMBERS)
        self._delay = float(os.environ.get(DELAY, "0.001"))
        self._random = random.Random(rank)
        threading.Thread(target=self._work, daemon=True).start()

    # ------------------------------------------------------------------ operations

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        (tensor,) = tensors

        def run() -> _Results:
            host = _read(tensor)
            self._gloo.send([torch.tensor([host.nbytes])], peer, 0).wait(_LONG)
            self._gloo.send([_bytes(host)], peer, 0).wait(_LONG)
            return []

        return self._start("send", run, read=tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        (tensor,) = tensors

        def run() -> _Results:
            size = torch.zeros(1, dtype=torch.int64)
            self._gloo.recv([size], peer, 0).wait(_LONG)
            if int(size) != tensor.nbytes:
                raise RuntimeError(f"{int(size)} bytes came, {tensor.nbytes} were expected")
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._gloo.recv([_bytes(host)], peer, 0).wait(_LONG)
            return [(tensor, host)]

        return self._start("receive", run, written=tensors)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        return self._in_place("all-reduce", tensors, self._gloo.allreduce, options or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        return self._in_place("broadcast", tensors, self._gloo.broadcast, options)

    def reduce(self, tensors: list[Tensor], options: Any) -> Work:
        here = self.rank() == options.rootRank
        return self._in_place("reduce", tensors, self._gloo.reduce, options, keeps=here)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Work:
        def run() -> _Results:
            hosts = [torch.empty(each.shape, dtype=each.dtype) for each in outputs[0]]
            self._gloo.allgather([hosts], [_read(inputs[0]).contiguous()]).wait(_LONG)
            return list(zip(outputs[0], hosts, strict=True))

        return self._start("all-gather", run, read=inputs, written=outputs[0])

    def barrier(self, opts: Any = None) -> Work:
        return self.allreduce([torch.zeros(1, device="cuda")])

    def _in_place(self, what: str, tensors: list[Tensor], call: Any, options: Any, keeps: bool = True) -> Work:
        (tensor,) = tensors

        def run() -> _Results:
            host = _read(tensor).contiguous()
            call([host], options).wait(_LONG)
            return [(tensor, host)] if keeps else []

        return self._start(what, run, written=tensors)

    def _start(
        self, what: str, run: Callable[[], _Results], read: Sequence[Tensor] = (), written: Sequence[Tensor] = ()
    ) -> Work:
        for tensor in (*read, *written):
            if not tensor.is_cuda:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if tensor.device.index != torch.cuda.current_device():
                raise RuntimeError(f"a tensor of {tensor.device} while cuda:{torch.cuda.current_device()} is current")
        if not self._opened:
            self._opened = True
            self._gloo.barrier().wait(_LONG)
        bytes_ = sum(tensor.nbytes for tensor in (*read, *written))
        work = Work(f"{what} of {bytes_} bytes", run, self._timeout, self._stream)
        # its stream goes on where the current one is, and the work's own event comes behind it
        device.SEEN.told("record", id(self), _current_stream())
        device.SEEN.told("block", id(self), self._stream)
        device.SEEN.told("launch", f"nccl {what}", self._stream, _places(read), _places(written))
        device.SEEN.told("record", id(work), self._stream)
        self._queue.put(work)
        return work

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._random.random() * self._delay)
            work.run()
            del work  # or what it holds lasts until the next one

    # ------------------------------------------------------------------ what torch asks of a group

    def abort(self) -> None:
        self._queue.put(None)

    shutdown = _abort = _shutdown = abort

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_description

    def _has_hooks(self) -> bool:
        return False

    def name(self) -> str:
        return "nccl"

    getBackendName = name  # noqa: N815

    def _get_backend_name(self) -> str:
        return "nccl"

    def _get_backend(self, place: torch.device) -> Nccl:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]


def install() -> None:
    """Let torch find it where NCCL would be."""
    for module in (dist, dist.distributed_c10d):
        module.ProcessGroupNCCL = Nccl  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
    dist.distributed_c10d._NCCL_AVAILABLE = True  # type: ignore[attr-defined]


def _read(tensor: Tensor) -> Tensor:
    """A copy on the host, as NCCL's kernel reads it."""
    with torch.no_grad():
        return device.native.read(tensor)


def _bytes(host: Tensor) -> Tensor:
    return host.detach().contiguous().flatten().view(torch.uint8)


def _current_stream() -> int:
    return device.native.current_stream()


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]
