"""What it takes to bring a batch of images to all ranks of a pipeline: bytes and time, without reading files.

A rank with the last stage loads each batch and sends it whole to the others. Of a batch of images and labels the first
stage uses the images and the last one the labels; stages between them use neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.nonblocking_broadcast import BATCHES, NonBlockingBroadcast
from lightning_pipe.transport.objects import encode
from lightning_pipe.transport.topology import Topology
from tests.benchmarks.measure import Finding
from tests.support import processes

PIXELS, SAMPLES = 480, 8
MB = 1e6


def run(quick: bool) -> list[Finding]:
    """Two and four ranks, on one host and as between hosts."""
    findings = []
    for ranks in (2, 4):
        findings.append(
            Finding(
                f"{ranks} ranks, {SAMPLES} images of {PIXELS} pixels: bytes sent",
                f"{sent_bytes(ranks) / MB:.1f} MB per batch",
                f"{batch()[0].nbytes / MB:.1f} MB are used",
            )
        )
        for local, name in ((True, "shared memory"), (False, "sockets")):
            topology = Topology(ranks, loss_rank=-1)
            seconds = processes.run_pipeline(
                receive_batches, topology, timeout=200, group_timeout=100, local=local, batches=4 if quick else 20
            )
            findings.append(Finding(f"{ranks} ranks, {name}: time", f"{1e3 * max(seconds):.1f} ms per batch"))
    return findings


def batch() -> list[Tensor]:
    """Images and labels."""
    return [torch.rand(SAMPLES, 3, PIXELS, PIXELS), torch.zeros(SAMPLES, dtype=torch.long)]


def sent_bytes(ranks: int) -> int:
    """What the rank that loads, the last one, sends of a batch: all messages, to each of the others."""
    text, large = encode(("batch", batch(), None, {}))
    return (ranks - 1) * sum(message.nbytes for message in (text, *large))


def receive_batches(transport: Transport, batches: int) -> float:
    """The median of the seconds from asking for a batch to having it, on one rank; all ask at the same time."""
    ready: Sequence[list[Tensor]] = [batch()] * (batches + 1)
    source = transport.peers[-1]
    channel = NonBlockingBroadcast(transport)

    def share(message: Any) -> Any:
        message = channel.share(message, source, BATCHES)
        channel.end_batch()
        return message

    iterator = iter(SharedDataLoader(ready, transport, source, share))
    times = []
    for _ in range(batches + 1):
        transport.barrier()
        start = time.perf_counter()
        next(iterator)
        times.append(time.perf_counter() - start)
    channel.flush()
    return statistics.median(times[1:])
