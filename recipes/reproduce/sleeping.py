"""The bubble of the running engine: layers that sleep, in one process for each rank."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.config import THOROUGH
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Family
from lightning_pipe.transport.base import Transport


@dataclass(frozen=True)
class Case:
    """A schedule at work.

    Args:
        family: the schedule.
        micro_batches: of a batch; without a flush, of each of the batches that follow one another.
        forward: seconds that a rank sleeps for the forward pass of a micro-batch.
        backward: seconds for its backward pass, which has two equal halves.
        batches: that are measured, or, without a flush, over which the mean time is taken.
    """

    family: Family
    micro_batches: int
    forward: float
    backward: float
    batches: int


class _Slept(threading.local):
    """Seconds that a rank has slept: each rank is a thread, of its own process or of one that holds all."""

    seconds = 0.0


# Layers do not count for themselves: what a layer counts is sent to the stages behind it.
_slept = _Slept()


def sleep(seconds: float) -> None:
    """Sleep, and add it to what `slept` returns."""
    start = time.perf_counter()
    time.sleep(seconds)
    _slept.seconds += time.perf_counter() - start


def slept() -> float:
    """Seconds that this rank has slept so far: a busy machine wakes it late."""
    return _slept.seconds


class _Sleep(torch.autograd.Function):
    """The identity; its backward pass sleeps as long as its forward pass was told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: float, after: float) -> Tensor:
        ctx.after = after
        if before:
            sleep(before)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sleep(ctx.after)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """A layer whose compute needs no core, so that many ranks fit on few.

    Args:
        forward: seconds of its forward pass for each sample.
        half: seconds of its backward pass for its input, and again for its weight.

    Attributes:
        awake: whether it does not sleep.
    """

    def __init__(self, forward: float, half: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seconds, self.half_seconds, self.awake = forward, half, False

    def forward(self, x: Tensor) -> Tensor:
        """The input, after a sleep."""
        if self.awake:
            return x * self.scale
        weight = _Sleep.apply(self.scale, 0.0, self.half_seconds)  # type: ignore[no-untyped-call]
        out: Tensor = _Sleep.apply(x, len(x) * self.seconds, self.half_seconds) * weight  # type: ignore[no-untyped-call]
        return out


def measure(transport: Transport, cases: Sequence[Case]) -> list[float]:
    """The share of the ranks' time in which no layer sleeps, for each case: all of them in the same processes."""
    return [(_flushed if case.family.synchronous else _streamed)(transport, case) for case in cases]


def _pipeline(transport: Transport, case: Case) -> tuple[Pipeline, nn.Module, list[Tensor]]:
    ranks = transport.topology.ranks
    stages = ranks * case.family.stages_per_rank
    share = 1 / case.family.stages_per_rank
    net = nn.Sequential(*(Sleeper(share * case.forward, share * case.backward / 2) for _ in range(stages)))
    pipeline = Pipeline(net, find_layers(net), [1] * stages, case.family, transport)
    pipeline.partition()
    return pipeline, net, [torch.ones(1, 4) for _ in range(case.micro_batches)]


def _flushed(transport: Transport, case: Case) -> float:
    """The median over batches, from the last rank's arrival at a barrier to the last rank's end.

    In the first batches ranks agree on what travels, and compare what layers hold: these do not count, nor sleep.
    """
    pipeline, net, parts = _pipeline(transport, case)
    ranks = transport.topology.ranks
    found: list[float] = []
    for number in range(THOROUGH + case.batches):
        for sleeper in net.children():
            assert isinstance(sleeper, Sleeper)
            sleeper.awake = number < THOROUGH
        arrived, before = time.monotonic(), slept()
        transport.barrier()
        # The input needs a gradient, so that the first stage's backward pass has both halves.
        pipeline.train(lambda _, part: net(part.requires_grad_()).sum(), parts, [1 / len(parts)] * len(parts))
        # The monotonic clock is the same for all processes of a host.
        mine = (arrived, time.monotonic(), slept() - before)
        times = transport.all_gather_object(mine, tuple(range(ranks)))
        makespan = max(end for _, end, _ in times) - max(start for start, _, _ in times)
        found.append(1 - sum(asleep for _, _, asleep in times) / (ranks * makespan))
    return statistics.median(found[THOROUGH:])


def _streamed(transport: Transport, case: Case) -> float:
    """Once the pipeline is filled: of the first rank's time over several batches."""
    pipeline, net, parts = _pipeline(transport, case)
    stream: Any = pipeline.asynchronous
    filled = 3 * transport.topology.ranks // case.micro_batches + THOROUGH
    start = asleep = 0.0
    for number in range(filled + case.batches):
        if number == filled:
            start, asleep = time.monotonic(), slept()
        stream.advance(lambda _, part: net(part.requires_grad_()).sum(), parts, [1 / len(parts)] * len(parts))
        net.zero_grad()  # in the place of a step
    found = 1 - (slept() - asleep) / (time.monotonic() - start)
    for _ in stream.drain():
        net.zero_grad()
    return float(transport.all_gather_object(found, tuple(range(transport.topology.ranks)))[0])
