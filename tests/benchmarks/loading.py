"""What it takes to bring a batch of images to all ranks of a pipeline: bytes and time, without reading files.

A rank with the last stage loads each batch and sends to each of the others what it uses:
of a batch of images and labels the first stage uses the images and the last one the labels, stages between them use
neither. Sending whole batches is measured beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.trainer.data.needs import versions_of
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.nonblocking_broadcast import NonBlockingBroadcast
from lightning_pipe.transport.objects import encode
from lightning_pipe.transport.topology import Topology
from tests.benchmarks.measure import Finding
from tests.support import processes

PIXELS, SAMPLES = 480, 8
MB = 1e6


def run(quick: bool) -> list[Finding]:
    """Two and four ranks, on one host and as between hosts: whole batches, and what each stage uses."""
    findings = []
    for ranks in (2, 4):
        whole, used = sent_bytes(ranks, whole=True), sent_bytes(ranks, whole=False)
        findings.append(
            Finding(
                f"{ranks} ranks, {SAMPLES} images of {PIXELS} pixels: bytes sent",
                f"{used / MB:.1f} MB per batch",
                f"{whole / MB:.1f} MB with whole_batches=True",
            )
        )
        for local, name in ((True, "shared memory"), (False, "sockets")):
            topology = Topology.for_schedule(ranks)
            seconds = processes.run_pipeline(
                receive_batches, topology, timeout=200, group_timeout=100, local=local, batches=4 if quick else 20
            )
            used_ms, whole_ms = (1e3 * max(times) for times in zip(*seconds, strict=True))
            findings.append(
                Finding(
                    f"{ranks} ranks, {name}: time",
                    f"{used_ms:.1f} ms per batch",
                    f"{whole_ms:.1f} ms with whole batches",
                )
            )
    return findings


def batch() -> list[Tensor]:
    """Images and labels."""
    return [torch.rand(SAMPLES, 3, PIXELS, PIXELS), torch.zeros(SAMPLES, dtype=torch.long)]


def used_by_stage(ranks: int) -> list[set[int]]:
    """The positions of the tensors that each stage uses."""
    return [{0}, *[set[int]()] * (ranks - 2), {1}]


class Used:
    """Knows what the stages use; or sends whole batches."""

    def __init__(self, needed: Mapping[int, set[int]], *, whole: bool) -> None:
        self._needed, self._whole = needed, whole

    def begin_pass(self) -> None:
        """Nothing is to be learnt."""

    def versions(self, iterator: object, batch: Any) -> Mapping[int, Any]:
        """What to send of a batch, by process."""
        return {} if self._whole else versions_of(batch, self._needed)


def sent_bytes(ranks: int, *, whole: bool) -> int:
    """What the rank that loads, the last one, sends of a batch: all messages, to each of the others."""
    own, needed = batch(), dict(enumerate(used_by_stage(ranks)[:-1]))
    versions = Used(needed, whole=whole).versions(None, own)
    sent = [("batch", versions.get(stage, own), None, {}) for stage in needed]
    return sum(message.nbytes for each in sent for message in encode(each))


def receive_batches(transport: Transport, batches: int) -> tuple[float, float]:
    """The median of the seconds from asking for a batch to having it, on one rank: what it uses, and whole ones.

    All ranks ask at the same time.
    """
    ready: Sequence[list[Tensor]] = [batch()] * (batches + 1)
    stages = used_by_stage(len(transport.peers))
    members, source = tuple(sorted(transport.peers)), transport.peers[-1]
    needed = {process: stages[stage] for stage, process in enumerate(transport.peers[:-1])}
    channels = [NonBlockingBroadcast(transport, ahead=2, number=number) for number in range(2)]

    def begin(channel: NonBlockingBroadcast, *, whole: bool) -> Iterator[Any]:
        def share(message: Any) -> Any:
            message = channel.share(message, source, members)
            channel.end_call()
            return message

        return iter(SharedDataLoader(ready, transport, source, members, share, Used(needed, whole=whole)))

    iterators = [begin(channel, whole=whole) for channel, whole in zip(channels, (False, True), strict=True)]
    times: list[list[float]] = [[], []]
    for _ in range(batches + 1):
        for iterator, own in zip(iterators, times, strict=True):  # in turn, so that both see the same machine
            transport.barrier()
            start = time.perf_counter()
            next(iterator)
            own.append(time.perf_counter() - start)
    for channel in channels:
        channel.flush()
    used, whole = (statistics.median(own[1:]) for own in times)
    return used, whole
