"""The closed forms of the papers, computed in one process from the whole model, and the engine beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.engine.asynchronous import CallResult
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Family
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support.engine_runs import Batch, split
from tests.support.threads import run_threads, thread_world
from tests.support.zoo import base

WIDTH, ROWS, BATCHES = 6, 8, 10
Values = dict[str, Tensor]
Version = Callable[[int, int], int]


class Block(base.Block):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class Net(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, layer: Callable[[], nn.Module] = Block, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(x)
        if scale != 1.0:
            x = x * scale
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(self.head(x), y)


def batches(number: int = BATCHES, rows: Sequence[int] = (ROWS,), **extra: Sequence[Any]) -> list[Batch]:
    """Random batches; the numbers of rows, and what else is in a batch, take turns."""
    generator = torch.Generator().manual_seed(1)

    def draw(index: int) -> Tensor:
        return torch.randn(rows[index % len(rows)], WIDTH, generator=generator)

    return [
        {"x": draw(i), "y": draw(i), **{name: values[i % len(values)] for name, values in extra.items()}}
        for i in range(number)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


@dataclass
class Result:
    """Losses of all batches, values at the end, and what evaluations have found."""

    losses: list[float] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)


# ------------------------------------------------------------------ the truth


def pipedream(stages: int) -> Version:
    """Weight stashing: PipeDream, section 3.3."""
    return lambda stage, t: max(0, t - (stages - 1 - stage))


def vertical(stages: int) -> Version:
    """Vertical sync: the same section."""
    return lambda stage, t: max(0, t - (stages - 1))


def two_versions(stage: int, t: int) -> int:
    """PipeDream-2BW, section 3.1."""
    return max(0, t - 1)


def stages_of(model: nn.Module, stages: int) -> dict[str, int]:
    """The stage of every parameter, layers being divided evenly."""
    depth = len(model.layers)
    sizes = [depth // stages + (stage < depth % stages) for stage in range(stages)]
    of_layer = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    found = {}
    for name, parameter in model.named_parameters():
        first, _, rest = name.partition(".")
        if parameter.requires_grad:
            outside = 0 if first == "embed" else stages - 1
            found[name] = of_layer[int(rest.partition(".")[0])] if first == "layers" else outside
    return found


class ClosedForm:
    """The weights of every stage after each of its steps, and the batches on the versions that they are to use.

    Args:
        model: the whole model.
        stages: number of stages.
        version: ``version(stage, t)``: the steps that the stage's weights have seen that batch ``t`` runs on.
        optimizer: makes the optimizer of each stage.
        together: for each stage the batches that make one step, their gradients averaged.
        tied: pairs of parameters that are one, with their gradients summed.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: int,
        version: Version,
        optimizer: Callable[..., torch.optim.Optimizer],
        together: Sequence[int] | None = None,
        tied: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.model, self._worker, self._tied = copy.deepcopy(model), copy.deepcopy(model), tied
        self._version, self._together = version, together or [1] * stages
        self._stage_of = stages_of(model, stages)
        self._true, self._used = dict(self.model.named_parameters()), dict(self._worker.named_parameters())
        own = [[name for name in self._stage_of if self._stage_of[name] == stage] for stage in range(stages)]
        self._own = [names for names in own if names]
        self.optimizers = [optimizer([self._true[name] for name in names]) for names in self._own]
        self.begin()

    def begin(self) -> None:
        """The pipeline is empty: versions are counted anew."""
        self._t = 0
        self._history = {name: [self._true[name].detach().clone()] for name in self._stage_of}
        self._waiting: dict[str, list[Tensor]] = {name: [] for name in self._stage_of}

    def train(self, batch: Batch, micro_batches: int, last: bool) -> float:
        """One batch; ``last``: no more come before the pipeline is empty."""
        with torch.no_grad():
            for name, stage in self._stage_of.items():
                self._used[name].copy_(self._history[name][self._version(stage, self._t)])
        self._worker.zero_grad()
        total = 0.0
        for part, weight in zip(*split(batch, micro_batches), strict=True):
            loss = self._worker(**part) * weight
            loss.backward()
            total += loss.item()
        gradients = {name: self._used[name].grad for name in self._stage_of}
        for one, other in self._tied:
            gradients[one] = gradients[other] = gradients[one] + gradients[other]
        for name, gradient in gradients.items():
            self._waiting[name].append(gradient.clone())
        self._t += 1
        for names, optimizer in zip(self._own, self.optimizers, strict=True):
            if last or self._t % self._together[self._stage_of[names[0]]] == 0:
                self._step(names, optimizer)
        return total

    def _step(self, names: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
        for name in names:
            self._true[name].grad = torch.stack(self._waiting[name]).mean(0)
            self._waiting[name].clear()
        optimizer.step()
        for name in names:
            self._history[name].append(self._true[name].detach().clone())

    def values(self) -> Values:
        """The newest weights, with the buffers of the forward passes."""
        return {**self._worker.state_dict(), **{n: p.detach().clone() for n, p in self._true.items()}}


def closed_form(
    model: nn.Module,
    data: Sequence[Batch],
    stages: int,
    version: Version,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    *,
    micro_batches: int = 1,
    drains: Sequence[int] = (),
    evaluated: Batch | None = None,
    rate: Callable[[int], float] | None = None,
    **options: Any,
) -> Result:
    """All batches in order; after ``drains`` batches the pipeline is emptied and evaluates; ``rate`` is by step."""
    truth, result = ClosedForm(model, stages, version, optimizer, **options), Result()
    for number, batch in enumerate(data, 1):
        for each in truth.optimizers if rate else ():
            each.param_groups[0]["lr"] = rate(number - 1)
        result.losses.append(truth.train(batch, micro_batches, last=number in drains or number == len(data)))
        if number in drains:
            truth.begin()
            with torch.no_grad():
                result.evaluated.append(float(truth.model(**evaluated or data[0])))
    result.values = truth.values()
    return result


# ------------------------------------------------------------------ the engine


@dataclass
class Rank:
    """One rank at work: lets the optimizer step where it is due, and collects losses."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    losses: dict[int, float] = field(default_factory=dict)
    weights: list[list[float]] = field(default_factory=list)

    def take(self, turns: Iterable[CallResult]) -> None:
        for turn in turns:
            if turn.update:
                self.optimizer.step()
                self.optimizer.zero_grad()
            for number, results in turn.results.items():
                assert number not in self.losses
                self.losses[number] = sum(float(v) * self.weights[number][i] for i, v in results.items())
            flow = self.pipeline.asynchronous
            assert flow is not None
            assert len(flow.versions.stash) + 1 <= flow.stream.weight_versions[self.pipeline.transport.rank]


def train(
    transport: Transport,
    module: nn.Module,
    data: Sequence[Batch],
    family: Family,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    stages: int,
    micro_batches: int = 1,
    drains: Sequence[int] = (),
    finish: Callable[[Pipeline], None] = lambda pipeline: None,
    **options: Any,
) -> Result:
    """What one rank does; see `pipelined`."""
    layers, replicas = find_layers(module, "layers"), transport.topology.replicas
    even = [len(layers) // stages + (stage < len(layers) % stages) for stage in range(stages)]
    pipeline = Pipeline(module, layers, even, family, transport, **options)
    pipeline.partition()
    result = Result()
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    rank = Rank(pipeline, optimizer(trainable))

    def step(index: int, part: Batch) -> Any:
        return module(**part)

    for number, batch in enumerate(data, 1):
        # every replica has its own part of the batch
        parts, weights = (each[transport.replica :: replicas] for each in split(batch, micro_batches * replicas))
        rank.weights.append(weights)
        rank.take([pipeline.asynchronous.advance(step, parts, rank.weights[-1], seed=number)])
        if number in drains or number == len(data):
            rank.take(pipeline.asynchronous.drain())
        if number in drains:
            with torch.no_grad():
                values = pipeline.evaluate(step, [dict(data[0])])
            result.evaluated += [float(value) for value in values.values()]
    finish(pipeline)
    pipeline.restore()
    result.losses = [rank.losses.get(number, 0.0) for number in range(len(data))]
    result.values = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return result


def pipelined(
    model: nn.Module,
    data: Sequence[Batch],
    ranks: int,
    family: Family,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    *,
    stages: int | None = None,
    replicas: int = 1,
    **options: Any,
) -> Result:
    """Train over threads; after ``drains`` batches the pipeline is emptied and evaluates. Ends with ``finish``."""
    count = stages or len(getattr(family, "replicas", None) or range(ranks))
    loss_rank = family.build(ranks, 4 * ranks, stages=count).loss_ranks[0]
    world = thread_world(Topology(ranks, replicas, loss_rank), timeout=timedelta(seconds=20))
    modules = [copy.deepcopy(model) for _ in world]
    results = run_threads(
        world,
        lambda transport: train(
            transport, modules[transport.process], data, family, optimizer, stages=count, **options
        ),
        timeout=60,
    )
    return merged(results)


def merged(results: Sequence[Result]) -> Result:
    """What all ranks together have found; they must agree on the weights to the last bit."""
    for other in results[1:]:
        assert all(torch.equal(other.values[name], value) for name, value in results[0].values.items())
    losses = [sum(each) for each in zip(*(result.losses for result in results), strict=True)]
    evaluated = next((result.evaluated for result in results if result.evaluated), [])
    return Result(losses, results[0].values, evaluated)


def assert_same(found: Result, expected: Result) -> None:
    """Everything within 1e-12."""
    pairs: list[tuple[str, Any, Any]] = [
        ("losses", torch.tensor(found.losses), torch.tensor(expected.losses)),
        ("evaluated", torch.tensor(found.evaluated), torch.tensor(expected.evaluated)),
        *((name, found.values[name], value) for name, value in expected.values.items()),
    ]
    for what, a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, what=what: f"{what}: {text}")
