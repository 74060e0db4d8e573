"""Measures what messages, reductions and the engine cost between the processes of the coming run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.parameters.gradient_sync import GradientSync
from lightning_pipe.partition import find_layers
from lightning_pipe.profiling.layers import settled
from lightning_pipe.simulate.link import Link
from lightning_pipe.transport.base import Channel, Lane, Transport

_THERE, _BACK = Lane("forward"), Lane("backward")
_SMALL, _LARGE = 1 << 10, 1 << 22
_FEW, _MANY = 2, 8
_PARAMETERS = 16
"""Whose gradients are summed at once."""


def measure_machine(transport: Transport, rounds: int, overhead: float) -> dict[str, Any]:
    """The fields ``message``, ``all_reduce`` and ``batch`` of a `CostProfile`, measured with all processes. Collective.

    The figures are those of rank 0 everywhere.

    Args:
        transport: of one pipeline.
        rounds: repetitions; medians count.
        overhead: seconds of the engine per compute action, which are no part of a message.
    """
    if transport.topology.ranks == 1:
        return {"message": Link(), "all_reduce": Link(), "batch": 0.0}
    everyone = transport.topology.everyone
    transport.connect([Channel(0, 1, _THERE), Channel(1, 0, _BACK)])
    large, small = (_median(rounds, partial(_round_trip, transport, size)) / 2 for size in (_LARGE, _SMALL))
    beta = max(0.0, (large - small) / (_LARGE - _SMALL))
    transport.make_groups([everyone])
    members = len(everyone)
    many, few = (_median(rounds, partial(_all_reduce, transport, size)) for size in (_LARGE, _SMALL))
    steps, share = Link(alpha=1).all_reduce(0, members), Link(beta=1).all_reduce(1, members)
    reduce_beta = max(0.0, (many - few) / (_LARGE - _SMALL) / float(share))
    latency, batch = _through_the_engine(transport, rounds, overhead)
    found = {"message": Link(latency, beta), "all_reduce": Link(few / float(steps), reduce_beta), "batch": batch}
    return transport.all_gather_object(found, everyone)[0]  # type: ignore[no-any-return]


def _median(rounds: int, sample: Callable[[], float]) -> float:
    return statistics.median([sample() for _ in range(rounds + 2)][2:])


def _round_trip(transport: Transport, size: int) -> float:
    """Between the first two ranks; the others have nothing to do."""
    out = torch.zeros(size, dtype=torch.uint8, device=transport.device)
    into = torch.empty_like(out)
    start = settled()
    if transport.rank == 0:
        transport.send(out, 1, _THERE).wait()
        transport.receive(into, 1, _BACK).wait()
    elif transport.rank == 1:
        transport.receive(into, 0, _THERE).wait()
        transport.send(out, 0, _BACK).wait()
    return settled() - start


def _all_reduce(transport: Transport, size: int) -> float:
    """Of gradients, as the engine sums them: into buckets, over all processes, and out of them."""
    gradients = GradientSync(transport)
    parameters = [
        nn.Parameter(torch.zeros(size // 4 // _PARAMETERS, device=transport.device)) for _ in range(_PARAMETERS)
    ]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradients.add(0, parameters, transport.topology.everyone)
    transport.barrier()
    start = settled()
    gradients.finish()
    return settled() - start


def _through_the_engine(transport: Transport, rounds: int, overhead: float) -> tuple[float, float]:
    """Seconds of a message between two stages, and of a batch besides its actions.

    One micro-batch after the other passes layers that do next to nothing: 2 p actions and 2 (p - 1) messages each.
    """
    ranks = transport.topology.ranks
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(ranks))).to(transport.device)
    family = schedules.get("naive")
    pipeline = Pipeline(module, find_layers(module), [1] * ranks, family, transport)
    pipeline.executor.clock = settled
    pipeline.partition()
    few, many = (_batches(pipeline, module, number, rounds) for number in (_FEW, _MANY))
    per_micro_batch = (many - few) / (_MANY - _FEW)
    latency = (per_micro_batch - 2 * ranks * overhead) / (2 * (ranks - 1))
    return max(0.0, latency), max(0.0, few - _FEW * per_micro_batch)


def _batches(pipeline: Pipeline, module: nn.Module, micro_batches: int, rounds: int) -> float:
    """Median seconds of a batch without what its stages compute."""
    transport = pipeline.transport
    samples: list[float] = []
    everyone = transport.topology.everyone
    parts = [torch.ones(1, 1, device=transport.device)] * micro_batches
    weights = [1 / micro_batches] * micro_batches
    for number in range(rounds + 2):
        busy = pipeline.executor.busy
        transport.barrier()
        start = settled()
        pipeline.train(lambda _, part: module(part).sum(), parts, weights, seed=number)
        mine = (settled() - start, pipeline.executor.busy - busy)
        both = transport.all_gather_object(mine, everyone)
        samples.append(max(passed for passed, _ in both) - sum(computed for _, computed in both))
    return statistics.median(samples[2:])
