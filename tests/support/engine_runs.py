"""The engine against one device, both without a trainer: ranks are threads of this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.topology import Topology
from tests.support.oracle import loss_of, state_of
from tests.support.threads import ThreadTransport, run_threads, thread_world

Batch = Mapping[str, Any]


@dataclass
class Outcome:
    """What training left: the loss of every batch and the parameters and buffers at the end."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    pipelines: list[Pipeline] = field(default_factory=list)


def split(batch: Batch, micro_batches: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Slices along dimension 0 of every tensor, and their shares of the samples."""
    samples = next(len(value) for value in batch.values() if isinstance(value, Tensor))
    parts = torch.arange(samples).tensor_split(min(micro_batches, samples))
    slices = [{k: v[part] if isinstance(v, Tensor) else v for k, v in batch.items()} for part in parts]
    return slices, [len(part) / samples for part in parts]


def single_device(
    model: nn.Module, batches: Sequence[Batch], micro_batches: int, optimizer: Callable[..., Any] = torch.optim.SGD
) -> Outcome:
    """Accumulate the same micro-batches on one device."""
    model, outcome = copy.deepcopy(model), Outcome()
    optimizer = optimizer(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for part, weight in zip(*split(batch, micro_batches), strict=True):
            loss = loss_of(model(**part))
            (loss * weight).backward()
            total += float(loss.detach()) * weight
        outcome.losses.append(total)
        optimizer.step()
    outcome.values = state_of(model)
    return outcome


def pipelined(
    model: nn.Module,
    batches: Sequence[Batch],
    micro_batches: int,
    *,
    ranks: int = 2,
    stages: int | None = None,
    schedule: Any = "1f1b",
    recompute: Any = "never",
    balance: Sequence[int] | None = None,
    layers: Any = None,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    between: Callable[[Pipeline, nn.Module], None] | None = None,
    call: Callable[[nn.Module, Any], Any] = lambda module, part: module(**part),
    seed: int = 0,
    **more: Any,
) -> Outcome:
    """Train over ``ranks`` threads; ``between(pipeline, module)`` runs on every rank after each batch."""
    family = schedules.get(schedule)
    total = stages or ranks * family.stages_per_rank
    loss_rank = family.build(ranks, 2 * ranks, stages=total).loss_ranks[0]
    world = thread_world(Topology(ranks, loss_rank=loss_rank), timeout=timedelta(seconds=20))

    def body(transport: ThreadTransport) -> tuple[Outcome, Pipeline]:
        module = copy.deepcopy(model)
        sequence = find_layers(module, layers)
        even = [len(sequence) // total + (stage < len(sequence) % total) for stage in range(total)]
        pipeline = Pipeline(module, sequence, balance or even, family, transport, recompute=recompute, **more)
        pipeline.partition()
        outcome, optim = Outcome(), optimizer(module.parameters(), lr=0.1)
        for number, batch in enumerate(batches):
            parts, weights = split(batch, micro_batches)
            optim.zero_grad()
            results = pipeline.train(lambda _, part: call(module, part), parts, weights, seed=seed + number)
            outcome.losses.append(sum(float(loss_of(results[i])) * weights[i] for i in results))
            optim.step()
            if between is not None:
                between(pipeline, module)
        pipeline.restore()
        outcome.values = state_of(module)
        return outcome, pipeline

    results = run_threads(world, body, timeout=40)
    outcome = results[0][0]
    for other, _ in results[1:]:
        assert_close(other.values, outcome.values, 0.0)
    # Bidirectional schedules have a loss at two ranks, each for micro-batches of its own.
    outcome.losses = [sum(parts) for parts in zip(*(each.losses for each, _ in results), strict=True)]
    outcome.pipelines = [pipeline for _, pipeline in results]
    return outcome


def assert_evaluates(
    model: nn.Module,
    batch: Batch,
    trained: Batch,
    context: Any = torch.no_grad,
    *,
    training: bool = True,
    **options: Any,
) -> None:
    """An evaluation of a batch gives the loss of one device, behind a batch of a training that changes nothing."""
    losses: list[float] = []

    def evaluate(pipeline: Pipeline, module: nn.Module) -> None:
        module.train(training)
        with context():
            losses.extend(map(float, pipeline.evaluate(lambda _, part: module(**part), [batch]).values()))

    pipelined(model, [trained], 1, between=evaluate, optimizer=unchanging, **options)
    model.train(training)
    with torch.no_grad():
        (found,), expected = losses, float(model(**batch))
    assert abs(found - expected) <= 1e-12, f"{found} instead of {expected}"


def unchanging(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer whose steps change nothing."""
    return torch.optim.SGD(parameters, lr=0.0)


def assert_same(model: nn.Module, batches: Sequence[Batch], micro_batches: int = 3, **options: Any) -> Outcome:
    """Losses, parameters and buffers equal those of one device."""
    optimizer = options.get("optimizer", torch.optim.SGD)
    expected = single_device(model, batches, micro_batches, optimizer)
    found = pipelined(model, batches, micro_batches, **options)
    assert_outcome(found, expected)
    return found


def assert_outcome(found: Outcome, expected: Outcome) -> None:
    """The same losses, parameters and buffers."""
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(a - b) <= 1e-9 * (1 + abs(b)), f"loss of step {step}: {a} instead of {b}"
    assert_close(found.values, expected.values, 1e-9)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every tensor within ``tolerance * (1 + |expected|)``."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        error = (found[name] - value).abs().double()
        assert bool((error <= tolerance * (1 + value.abs().double())).all()), f"{name} is off by {float(error.max())}"
