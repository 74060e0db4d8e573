"""What the engine itself costs: per action without user code, and the interception of the user's step."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.stage import Stages
from lightning_pipe.partition import find_layers
from lightning_pipe.patches import replaced
from lightning_pipe.schedules import lower
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.shared_memory import peer
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology
from tests.benchmarks.measure import Finding, Ratio, microseconds
from tests.support import processes

LIMIT = 40e-6
TIMES = 2.1
"""What a step of 16 tiny layers may cost at most, in times of the same on its own."""
STAGES, MICRO_BATCHES = 4, 16
BEGIN = 4
"""Batches that look at more than later ones."""


def run(quick: bool) -> list[Finding]:
    """Engine per action on one rank and with messages; interception per stage and micro-batch."""
    rounds = 20 if quick else 100
    alone = without_user_code(SingleProcess(), rounds)
    messages = max(processes.run_pipeline(without_user_code, Topology(2), rounds=rounds))
    findings = [
        Finding("engine per action, one rank", microseconds(alone), "at most 40 us", alone <= LIMIT),
        Finding("the same on two ranks, with messages", microseconds(messages), "at most 40 us", messages <= LIMIT),
    ]
    for layers in (4, 16):
        ours, plain = interception(SingleProcess(), layers, rounds)
        times = Ratio.of(ours, plain)
        name = f"a training step of {layers} tiny layers, one stage and micro-batch"
        findings += [
            Finding(name, f"{microseconds(statistics.median(each))}{how}")
            for each, how in ((ours, ""), (plain, " on its own"))
        ]
        if layers == 16:
            findings.append(
                Finding("the one in times of the other", str(times), f"at most {TIMES}", times.low <= TIMES)
            )
    return findings


class Meter:
    """Adds up the processor time inside the stages: the user's code, its interception, and autograd."""

    def __init__(self, stages: Stages) -> None:
        self.inside = 0.0
        for name, method in inspect.getmembers(stages, inspect.ismethod):
            if not name.startswith("_"):
                setattr(stages, name, self._metered(method))

    def _metered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*(self._outside(each) if callable(each) else each for each in args), **kwargs)
            finally:
                self.inside += time.thread_time() - start

        return call

    def _outside(self, receive: Callable[[], Any]) -> Callable[[], Any]:
        """What a stage asks for its input is the engine's own."""

        def call() -> Any:
            start = time.thread_time()
            try:
                return receive()
            finally:
                self.inside -= time.thread_time() - start

        return call


def without_user_code(transport: Transport, rounds: int) -> float:
    """Processor time per action of a 1F1B batch outside the stages; waiting for a peer takes none."""
    ranks = transport.topology.ranks
    stages = STAGES if ranks == 1 else ranks
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(stages)))
    pipeline = Pipeline(module, find_layers(module), [1] * stages, schedules.get("1f1b"), transport)
    meter = Meter(pipeline.executor.stages)
    actions = lower(pipeline.schedule(MICRO_BATCHES))[transport.rank]
    parts = [torch.ones(1, 1)] * MICRO_BATCHES
    weights = [1.0] * MICRO_BATCHES
    samples = []
    # around many batches, as the strategy does; and who waits sleeps at once
    with pipeline.executor.stages.interceptor.torch_patched(), replaced(peer, "_AWAKE", 0.0):
        for _ in range(rounds + BEGIN):
            transport.barrier()
            meter.inside = 0.0
            start = time.thread_time()
            pipeline.train(lambda _, part: module(part).sum(), parts, weights)
            samples.append((time.thread_time() - start - meter.inside) / len(actions))
    return statistics.median(samples[BEGIN:])


def interception(transport: Transport, layers: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds for forward and backward of one micro-batch on one stage, under the engine and on its own."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    pipeline = Pipeline(module, find_layers(module), [layers], schedules.get("gpipe"), transport)
    parts = [torch.ones(1, 4) for _ in range(MICRO_BATCHES)]
    weights = [1 / MICRO_BATCHES] * MICRO_BATCHES
    ours, plain = [], []
    # around many batches, as the strategy does: to patch torch takes as long as a dozen of these layers
    with pipeline.executor.stages.interceptor.torch_patched():
        for number in range(rounds):
            start = time.thread_time()
            pipeline.train(lambda _, part: module(part).sum(), parts, weights, seed=number)
            between = time.thread_time()
            for part, weight in zip(parts, weights, strict=True):
                (module(part).sum() * weight).backward()
            ours.append((between - start) / MICRO_BATCHES)
            plain.append((time.thread_time() - between) / MICRO_BATCHES)
    return ours[BEGIN:], plain[BEGIN:]
