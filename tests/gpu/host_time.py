"""Time of the host per action beside the time of kernels: from which batch size on the device hides the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.transport.single_process import SingleProcess
from tests.benchmarks.measure import Finding, microseconds
from tests.gpu.encoder import encoder
from tests.gpu.rows import PLACE
from tests.gpu.setting import Setting

STAGES, MICRO_BATCHES = 4, 8
ACTIONS = 2 * STAGES * MICRO_BATCHES
HIDDEN = 1.05
"""A batch takes at most so much longer than its kernels where the host is hidden."""


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each batch size, and the first that hides the host."""
    width, length = (16, 4) if setting.small else (1024, 512)
    torch.manual_seed(0)
    with PLACE:
        net = nn.Sequential(*encoder(width, 2 * STAGES))
    transport = SingleProcess(PLACE)
    found = find_layers(net)
    pipeline = Pipeline(net, found, divide(net, found, STAGES), schedules.get("1f1b"), transport)
    pipeline.partition()
    times: dict[int, tuple[float, float]] = {}
    for samples in (1,) if setting.small else (1, 2, 4, 8, 16, 32):
        batch = torch.randn(samples * MICRO_BATCHES, length, width, device=PLACE)
        host, whole, kernels = measured(pipeline, net, batch, rounds=1 if setting.small else 10)
        times[samples] = whole, kernels
        value = f"host {microseconds(host / ACTIONS)}, kernels {microseconds(kernels / ACTIONS)} per action"
        yield Finding(f"{samples} samples in a micro-batch", value)
    first = hidden_from(times)
    yield Finding(
        f"the host is hidden, {length} tokens of width {width}",
        "nowhere" if first is None else f"from {first} samples in a micro-batch on",
        f"a batch takes at most {HIDDEN} of its kernels' time",
        None if setting.small else first is not None,
    )


def hidden_from(times: dict[int, tuple[float, float]]) -> int | None:
    """The least number of samples from which on a batch takes hardly longer than its kernels.

    Example:
        >>> hidden_from({1: (2.0, 1.0), 2: (2.0, 1.9), 4: (4.0, 4.0)}), hidden_from({1: (2.0, 1.0)})
        (4, None)
    """
    first = None
    for samples in sorted(times, reverse=True):
        whole, kernels = times[samples]
        if whole > HIDDEN * kernels:
            break
        first = samples
    return first


def measured(pipeline: Pipeline, net: nn.Module, batch: Tensor, rounds: int) -> tuple[float, float, float]:
    """Seconds of a batch: until the host has issued it, until the device has done it, and of its kernels alone."""
    parts, weights = list(batch.chunk(MICRO_BATCHES)), [1 / MICRO_BATCHES] * MICRO_BATCHES

    def once() -> tuple[float, float]:
        net.zero_grad()
        torch.cuda.synchronize()
        start = time.perf_counter()
        pipeline.train(lambda _, part: net(part).square().mean(), parts, weights)
        issued = time.perf_counter()
        torch.cuda.synchronize()
        return issued - start, time.perf_counter() - start

    once()  # the first batch learns
    once()
    seconds = [once() for _ in range(rounds)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        once()
    kernels = sum(event.self_device_time_total for event in profiler.key_averages())
    host, whole = (statistics.median(column) for column in zip(*seconds, strict=True))
    return host, whole, kernels * 1e-6
