"""The closed forms of the papers, computed in one process from the whole model, and the engine over threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_pipe.partition import find_layers
from lightning_pipe.pipeline.asynchronous import Turn
from lightning_pipe.pipeline.memory_transport import MemoryTransport, memory_world, run_threads
from lightning_pipe.pipeline.runner import Pipeline
from lightning_pipe.pipeline.topology import Topology
from lightning_pipe.schedules import Family

WIDTH, ROWS, BATCHES = 6, 8, 24
Values = dict[str, Tensor]
Version = Callable[[int, int], int]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Layers between an embedding and a head of their own."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(self.head(x), y)


def batches(number: int = BATCHES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(ROWS, WIDTH, generator=generator)  # noqa: E731
    return [{"x": draw(), "y": draw()} for _ in range(number)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


def parts_of(batch: Mapping[str, Tensor], micro_batches: int) -> list[dict[str, Tensor]]:
    split = {name: value.tensor_split(micro_batches) for name, value in batch.items()}
    return [{name: values[i] for name, values in split.items()} for i in range(micro_batches)]


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)


# ------------------------------------------------------------------ the truth


def stages_of(model: nn.Module, stages: int) -> dict[str, int]:
    """The stage of every parameter, layers being divided evenly."""
    depth = len(model.layers)
    sizes = [depth // stages + (stage < depth % stages) for stage in range(stages)]
    of_layer = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    found = {}
    for name, _ in model.named_parameters():
        first, _, rest = name.partition(".")
        found[name] = {"embed": 0, "head": stages - 1}.get(first, -1)
        if first == "layers":
            found[name] = of_layer[int(rest.partition(".")[0])]
    return found


def closed_form(
    model: nn.Module,
    data: Sequence[Mapping[str, Tensor]],
    stages: int,
    version: Version,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    micro_batches: int = 1,
    together: Sequence[int] | None = None,
    drains: Sequence[int] = (),
) -> Result:
    """Batch ``t`` on versions ``version(stage, t)`` of its stages, counted from the last drain.

    ``together[stage]`` batches make one step of a stage, their gradients averaged.
    """
    model, result = copy.deepcopy(model), Result()
    stage_of, together = stages_of(model, stages), together or [1] * stages
    own = [[p for n, p in model.named_parameters() if stage_of[n] == stage] for stage in range(stages)]
    optimizers = [optimizer(parameters) for parameters in own]
    start, history = 0, _begin(model, stages)
    for number, batch in enumerate(data):
        t = number - start
        values = {n: history[stage][version(stage, t)][n].clone().requires_grad_() for n, stage in stage_of.items()}
        loss = torch.zeros(())
        for part in parts_of(batch, micro_batches):
            loss = loss + functional_call(model, values, (), part) / micro_batches
        result.losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(values.values()))
        last = number + 1 in drains or number + 1 == len(data)
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            size = together[stage_of[name]]
            count = t % size + 1 if last else size
            # so far as many as are in the round; what is there was divided by a full one
            gradient = gradient if count == size else gradient / count * size
            before = 0 if parameter.grad is None else parameter.grad * (1 if count == size else size / count)
            parameter.grad = before + gradient / size
        for stage in range(stages):
            if last or t % together[stage] == together[stage] - 1:
                optimizers[stage].step()
                optimizers[stage].zero_grad()
                history[stage].append({n: p.detach().clone() for n, p in model.named_parameters()})
        if number + 1 in drains:
            start, history = number + 1, _begin(model, stages)
            with torch.no_grad():
                result.evaluated.append(float(model(**data[0])))
    result.values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


def _begin(model: nn.Module, stages: int) -> list[list[Values]]:
    return [[{n: p.detach().clone() for n, p in model.named_parameters()}] for _ in range(stages)]


# ------------------------------------------------------------------ the engine


@dataclass
class Rank:
    """One rank at work: lets the optimizer step where it is due, and collects losses."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    share: int
    result: Result = field(default_factory=Result)
    losses: dict[int, float] = field(default_factory=dict)

    def take(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            if turn.update:
                self.optimizer.step()
                self.optimizer.zero_grad()
            for number, results in turn.results.items():
                self.losses[number] = sum(float(value) for value in results.values()) / self.share
            flow = self.pipeline.flow
            assert flow is not None
            rank = self.pipeline.transport.rank
            assert flow.versions.held <= flow.stream.weight_versions[rank]


def pipelined(
    model: nn.Module,
    data: Sequence[Mapping[str, Tensor]],
    ranks: int,
    family: Family,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    *,
    stages: int | None = None,
    replicas: int = 1,
    micro_batches: int = 1,
    drains: Sequence[int] = (),
    finish: Callable[[Pipeline], None] = lambda pipeline: None,
    **options: Any,
) -> Result:
    """Train over threads; after ``drains`` batches the pipeline is emptied and evaluates. Ends with ``finish``."""
    count = stages or len(getattr(family, "replicas", None) or range(ranks))
    loss_rank = family.build(ranks, 4 * ranks, stages=count).loss_ranks[0]
    world = memory_world(Topology.for_schedule(ranks, replicas, loss_rank), timeout=timedelta(seconds=20))
    modules = [copy.deepcopy(model) for _ in world]
    share = micro_batches * replicas

    def body(transport: MemoryTransport) -> Result:
        module = modules[transport.process]
        layers = find_layers(module, "layers")
        even = [len(layers) // count + (stage < len(layers) % count) for stage in range(count)]
        pipeline = Pipeline(module, layers, even, family, transport, **options)
        pipeline.partition()
        rank, step = Rank(pipeline, optimizer(module.parameters()), share), lambda _, part: module(**part)
        for number, batch in enumerate(data):
            # every replica has its own part of the batch
            parts = parts_of(batch, share)[transport.replica :: replicas]
            rank.take([pipeline.advance(step, parts, [1 / share] * len(parts), seed=number)])
            if number + 1 in drains or number + 1 == len(data):
                rank.take(pipeline.drain())
            if number + 1 in drains:
                with torch.no_grad():
                    values = pipeline.evaluate(step, [dict(data[0])])
                rank.result.evaluated += [float(value) for value in values.values()]
        finish(pipeline)
        pipeline.restore()
        rank.result.losses = [rank.losses.get(i, 0.0) for i in range(len(data))]
        rank.result.values = dict(module.state_dict())
        return rank.result

    results = run_threads(world, body, timeout=60)
    for other in results[1:]:
        assert all(torch.equal(other.values[name], value) for name, value in results[0].values.items())
    losses = [sum(each) for each in zip(*(result.losses for result in results), strict=True)]
    evaluated = next((result.evaluated for result in results if result.evaluated), [])
    return Result(losses, results[0].values, evaluated)


def assert_same(found: Result, expected: Result) -> None:
    for what, a, b in [
        ("loss", found.losses, expected.losses),
        ("evaluation", found.evaluated, expected.evaluated),
    ]:
        torch.testing.assert_close(
            torch.tensor(a), torch.tensor(b), rtol=1e-12, atol=1e-12, msg=lambda m, w=what: w + m
        )
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: n + m)


def pipedream(stages: int) -> Version:
    return lambda stage, t: max(0, t - (stages - 1 - stage))


def vertical(stages: int) -> Version:
    return lambda stage, t: max(0, t - (stages - 1))


def two_versions(stage: int, t: int) -> int:
    return max(0, t - 1)
