"""What one message costs: posting it, waiting for it, and a whole round trip."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from lightning_pipe.transport.base import Lane, Transport
from lightning_pipe.transport.topology import Topology
from tests.benchmarks.measure import Finding, microseconds
from tests.support import processes
from tests.support.threads import run_threads, thread_world

SIZES = {"64 B": 64, "256 KiB": 1 << 18, "4 MiB": 1 << 22}
THERE, BACK = Lane("forward"), Lane("backward")


def run(quick: bool) -> list[Finding]:
    """Median costs between threads, and between processes over Gloo and over shared memory."""
    rounds = 100 if quick else 400
    worlds = {
        "threads": run_threads(thread_world(Topology(2)), lambda transport: costs(transport, rounds))[0],
        "Gloo": processes.run_pipeline(costs, Topology(2), local=False, rounds=rounds)[0],
        "shared memory": processes.run_pipeline(costs, Topology(2), rounds=rounds)[0],
    }
    return [
        Finding(f"{world}: {what}, {size}", microseconds(seconds))
        for world, found in worlds.items()
        for (size, what), seconds in found.items()
    ]


def costs(transport: Transport, rounds: int) -> dict[tuple[str, str], float]:
    """Medians on rank 0, in seconds."""
    found: dict[tuple[str, str], float] = {}
    for name, size in SIZES.items():
        samples = [_round_trip(transport, size) for _ in range(rounds if size < 1 << 20 else rounds // 4)]
        for what, values in zip(
            ("post a send", "post a receive", "round trip"), zip(*samples, strict=True), strict=True
        ):
            found[name, what] = statistics.median(values)
    samples = [_object_round_trip(transport, {"shape": (3, 4)}) for _ in range(rounds)]
    found["small", "object round trip"] = statistics.median(samples)
    return found


def _round_trip(transport: Transport, size: int) -> tuple[float, float, float]:
    out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    if transport.rank == 1:
        transport.receive(into, 0, THERE).wait()
        transport.send(out, 0, BACK).wait()
        return 0.0, 0.0, 0.0
    start = time.perf_counter()
    sent = transport.send(out, 1, THERE)
    posted = time.perf_counter()
    received = transport.receive(into, 1, BACK)
    both = time.perf_counter()
    sent.wait()
    received.wait()
    return posted - start, both - posted, time.perf_counter() - start


def _object_round_trip(transport: Transport, obj: Any) -> float:
    start = time.perf_counter()
    if transport.rank == 1:
        transport.send_object(transport.receive_object(0, 0), 0, 0).wait()
    else:
        transport.send_object(obj, 1, 0).wait()
        transport.receive_object(1, 0)
    return time.perf_counter() - start
