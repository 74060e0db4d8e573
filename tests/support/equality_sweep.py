"""Trains a model of the zoo over threads and hands back what `tests.support.oracle` compares, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import Sharding
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.streamed_evaluation import StreamedEvaluation
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.schedules import Family
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support import oracle
from tests.support.model_zoo import Entry
from tests.support.oracle import Trace
from tests.support.threads import ThreadTransport, run_threads, thread_world
from tests.support.zoo.base import Module

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One point of the sweep.

    Args:
        schedule: name of the family, or the family.
        stages: number of stages; the ranks follow from the family's stages per rank.
        micro_batches: per batch.
        replicas: pipelines side by side.
        accumulate: batches per optimizer step.
        clip: limit of the norm of all gradients.
        steps: optimizer steps.
        ranks: ranks in one pipeline, where not as many as the stages ask for.
        evaluate: run a forward-only batch of another size after every training batch.
        recompute: which forward passes run again before their backward pass.
        sharded: what the holders of a parameter divide.
    """

    schedule: str | Family = "1f1b"
    stages: int = 2
    micro_batches: int = 3
    replicas: int = 1
    accumulate: int = 1
    clip: float | None = 0.5
    steps: int = 3
    ranks: int | None = None
    evaluate: bool = False
    recompute: Literal["never", "except_last", "always"] = "never"
    sharded: Sharding = False

    @property
    def pipeline_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        return max(1, self.stages // schedules.get(self.schedule).stages_per_rank)

    @property
    def topology(self) -> Topology:
        """The processes of all pipelines."""
        ranks = self.pipeline_ranks
        loss_rank = schedules.get(self.schedule).build(ranks, 2 * ranks, stages=self.stages).loss_ranks[0]
        return Topology(ranks, self.replicas, loss_rank=loss_rank)

    def __str__(self) -> str:
        extra = "-".join(
            f"{name}_{getattr(self, name)}"
            for name in ("accumulate", "ranks", "recompute", "sharded")
            if getattr(self, name) not in (1, None, "never", False)
        )
        label = schedules.get(self.schedule).label
        return f"{label}-s{self.stages}-m{self.micro_batches}-d{self.replicas}" + (f"-{extra}" if extra else "")


def expected(entry: Entry, point: Point) -> Trace:
    """The truth for a point."""
    return oracle.train(
        entry, point.steps, point.micro_batches, point.replicas, accumulate=point.accumulate, clip=point.clip
    )


def check(entry: Entry, point: Point) -> None:
    """Losses and weights of the pipeline equal those of one device."""
    oracle.assert_equal(pipelined(entry, point), expected(entry, point), entry.tolerance)


Around = Callable[[Module, Transport], AbstractContextManager[None]]


def pipelined(
    entry: Entry,
    point: Point,
    device: torch.device | None = None,
    around: Around = lambda module, transport: nullcontext(),
) -> Trace:
    """Trains over one thread per rank; all ranks must end with the same weights.

    Args:
        entry: the model and its batches.
        point: how it is trained.
        device: where the model is.
        around: entered around the training of every rank.
    """
    world = thread_world(point.topology, timedelta(seconds=20), device)
    # threads share the generator that initial weights are drawn from: build before they start
    modules = [entry.build() for _ in world]

    def body(transport: ThreadTransport) -> Trace:
        module = modules[transport.process]
        with around(module, transport):
            return train_rank(entry, module, point, transport)

    traces = run_threads(world, body, timeout=60)
    found = whole(traces, point.pipeline_ranks)
    for trace in traces[1:]:
        oracle.assert_equal(replace(trace, losses=[]), found, tolerance=0.0)
    return found


def whole(traces: Sequence[Trace], ranks: int) -> Trace:
    """The trace of all ranks: each notes its part of the loss, and bidirectional schedules have two with losses."""
    found = Trace(weights=traces[0].weights)
    for batch in zip(*(trace.losses for trace in traces), strict=True):
        found.losses += [sum(batch[start : start + ranks]) for start in range(0, len(batch), ranks)]
    return found


def over_threads(entry: Entry, point: Point, fn: Callable[[Pipeline, Module], T]) -> list[T]:
    """What a function of a pipeline and its module gives on each rank."""
    world = thread_world(point.topology, timedelta(seconds=20))
    modules = [entry.build() for _ in world]

    def body(transport: ThreadTransport) -> T:
        module = modules[transport.process]
        layers = find_layers(module, entry.layers)
        counts = divide(module, layers, point.stages)
        pipeline = Pipeline(module, layers, counts, schedules.get(point.schedule), transport)
        pipeline.partition()
        return fn(pipeline, module)

    return run_threads(world, body, timeout=60)


def evaluated(entry: Entry, point: Point, context: Callable[[], AbstractContextManager[Any]]) -> list[float]:
    """The losses of the micro-batches of one batch in an evaluation, twice, with the weights of the beginning."""
    losses: dict[tuple[int, int], float] = {}

    def body(pipeline: Pipeline, module: Module) -> None:
        for time in range(2):
            parts = oracle.split(entry.batches(1)[0], point.micro_batches)
            with context():
                results = pipeline.evaluate(lambda _, part: module.loss(part), parts)
            losses.update({(time, index): float(loss) for index, loss in results.items()})

    over_threads(entry, point, body)
    return [losses[place] for place in sorted(losses)]


def streamed(
    entry: Entry,
    at: Point,
    number: int,
    context: Callable[[], AbstractContextManager[Any]],
) -> tuple[list[float], list[list[str]]]:
    """The losses of a number of batches that follow each other through the stages, and what each rank ran.

    A batch that cannot be run ahead of the others has none.

    Args:
        entry: the model and its batches.
        at: the schedule and its stages.
        number: of batches.
        context: entered around them.
    """
    losses: dict[int, float] = {}

    def body(pipeline: Pipeline, module: Module) -> list[str]:
        ran: list[str] = []
        with context():
            for _ in range(2):  # with the plans of the first time
                stream = StreamedEvaluation(pipeline)
                batches = [
                    stream.begin(index, lambda _, part: module.loss(part), batch)
                    for index, batch in enumerate(entry.batches(number))
                ]
                # no rank waits for a later one: the first has run all batches when the last begins, if it is fast
                ran += performed(stream, number)
                losses.update((i, float(batch.results[0])) for i, batch in enumerate(batches) if batch.results)
                stream.end()
        return ran[: len(ran) // 2]

    ran = over_threads(entry, at, body)
    return [losses[index] for index in sorted(losses)], ran


def performed(stream: StreamedEvaluation, number: int) -> list[str]:
    """Let a rank go on to the end of so many batches; the actions that are left over are those of no batch."""
    ran = [action for action in stream.up_to(stream.end_of(number - 1)) if (action.micro_batch or 0) < number]
    for action in ran:
        stream.perform(action)
    return [str(action) for action in ran]


def train_rank(entry: Entry, module: Module, point: Point, transport: Transport) -> Trace:
    """What one rank does; see `pipelined`."""
    layers = find_layers(module, entry.layers)
    balance = divide(module, layers, point.stages)
    pipeline = Pipeline(module, layers, balance, schedules.get(point.schedule), transport, recompute=point.recompute)
    pipeline.partition()
    reductions = pipeline.reductions
    reductions.scattered = point.sharded == "gradients"
    optimizer = module.configure_optimizers()
    batches = iter(entry.batches(point.steps * point.replicas * point.accumulate))
    trace = Trace()
    for index in range(point.steps * point.accumulate):
        group = [next(batches) for _ in range(point.replicas)]
        parts = oracle.split(group[transport.replica], point.micro_batches)
        total = sum(map(oracle.samples, group))
        last = index % point.accumulate == point.accumulate - 1
        results = pipeline.train(
            lambda _, part, index=index: module.training_step(part, index),
            parts,
            [oracle.samples(part) / total / point.accumulate for part in parts],
            seed=index,
            reduce=last or reductions.scattered,
        )
        shares = oracle.shares(parts)
        trace.losses.append(sum(shares[i] * oracle.loss_of(result).item() for i, result in results.items()))
        if point.evaluate:
            _evaluate(entry, pipeline, index)
        if last:
            if point.clip is not None:
                clip_by_global_norm(pipeline, point.clip)
            if point.sharded is True and reductions.shards is not None:
                reductions.shards.drop_gradients()
            optimizer.step()
            if point.sharded and reductions.shards is not None:
                reductions.shards.share()
            optimizer.zero_grad()
    pipeline.restore()
    trace.weights = oracle.state_of(module)
    return trace


def clip_by_global_norm(pipeline: Pipeline, limit: float) -> None:
    """What `torch.nn.utils.clip_grad_norm_` does on one device: each parameter counts once."""
    rank, reductions = pipeline.transport.rank, pipeline.reductions
    mine = [
        p.grad
        for n, p in pipeline.local_parameters()
        if p.grad is not None and reductions.counts(p, first=pipeline.owners(n)[0] == rank)
    ]
    # on the device on every rank: a reduction is one of the host, or one of devices
    square = torch.zeros(1, dtype=torch.float64, device=pipeline.transport.device)
    for gradient in mine:
        square += gradient.double().square().sum()
    pipeline.transport.all_reduce(square, reductions.members_with_all).wait()
    nn.utils.clip_grads_with_norm_([p for _, p in pipeline.local_parameters()], limit, square.sqrt()[0])


def _evaluate(entry: Entry, pipeline: Pipeline, index: int) -> None:
    """A forward-only batch with fewer samples must leave nothing behind."""
    module = pipeline.module
    parts = oracle.split(oracle.split(entry.batches(1)[0], 2)[index % 2], 3)[:2]
    module.eval()
    with torch.no_grad():
        results = pipeline.evaluate(lambda _, part: module.loss(part), parts, seed=index)
    module.train()
    assert bool(results) == (pipeline.transport.rank == pipeline.loss_ranks[0])  # that of the first pipe
