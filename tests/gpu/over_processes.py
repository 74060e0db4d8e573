"""Trains models of the zoo over processes on devices, and the same on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightning_pipe.transport.arrangement import open_transport
from tests.benchmarks.measure import Finding
from tests.gpu.delays import Disturbance, disturbed
from tests.gpu.rows import PLACE, compared, moved_trace, on_device
from tests.support import equality_sweep, oracle, processes
from tests.support.equality_sweep import Point
from tests.support.model_zoo import ZOO
from tests.support.oracle import Trace

LIMIT = timedelta(seconds=60)


def equal(runs: Sequence[tuple[str, Point]], backend: str, disturbance: Disturbance | None = None) -> Iterator[Finding]:
    """A row for each run.

    Args:
        runs: models of the zoo, and how they are trained.
        backend: "gloo" or "nccl".
        disturbance: what is put into the runs.
    """
    for name, point in runs:
        label = f"{name}, {point}, {backend}" + ("" if disturbance is None else f", {disturbance}")
        yield compared(label, partial(_differences, name, point, backend, disturbance))


def _differences(name: str, point: Point, backend: str, disturbance: Disturbance | None) -> list[str]:
    expected = moved_trace(equality_sweep.expected(on_device(ZOO[name], PLACE), point))
    options: dict[str, Any] = {"name": name, "point": point, "own": backend == "nccl", "disturbance": disturbance}
    size = point.topology.world_size
    seconds = LIMIT.total_seconds()
    traces = processes.run_world(_train, size, timeout=80, group_timeout=seconds, group_backend=backend, **options)
    return oracle.differences(equality_sweep.whole(traces, point.pipeline_ranks), expected)


def _train(process: int, name: str, point: Point, own: bool, disturbance: Disturbance | None) -> Trace:
    """What one process does, on a device of its own or on one for all."""
    place = torch.device("cuda", process if own else 0)
    torch.cuda.set_device(place)
    transport = open_transport(point.topology, place, LIMIT)
    entry = on_device(ZOO[name], place)
    module = entry.build()
    with disturbed(module, transport, disturbance):
        trace = equality_sweep.train_rank(entry, module, point, transport)
    transport.barrier()
    transport.close()
    return moved_trace(trace)
