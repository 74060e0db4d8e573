"""Whether a pipeline trains like one device: curves of the recipes on one device and under every kind of schedule."""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipe import schedules
from lightning_pipe.engine.asynchronous import CallResult
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from recipes import config, job
from recipes.reproduce.pictures import curves
from recipes.reproduce.results import Result, Row
from tests.support.threads import run_threads, thread_world

LAST = 10
"""Steps whose mean loss is the end of a curve."""

ONE_DEVICE = "one device"
MICRO_BATCHED = "one device, same micro-batches"
"""One device that adds up the gradients of the micro-batches: what a schedule with a flush computes."""
SEEN = "; batch norm, where there is any, sees micro-batches"
Batch = dict[str, Tensor]
Curves = dict[str, list[list[float]]]
"""For every schedule the losses of each seed's run."""


def parity(
    models: dict[str, dict[str, Any]], steps: int, seeds: Sequence[int], ranks: int, micro_batches: int
) -> Result:
    """Rows and a picture for each model.

    Args:
        models: title -> experiment and overrides of the recipe, its schedules with and without a flush, tolerance.
        steps: of every run.
        seeds: of weights and order of the data; each gives a run for every schedule.
        ranks: of the pipelines, as threads.
        micro_batches: of a batch.
    """
    torch.set_num_threads(1)
    folder = Path(tempfile.gettempdir()) / "recipes.reproduce"
    paths = [f"paths.data={folder / 'data'}", f"paths.output={folder / 'run'}"]
    rows, pictures = [], []
    for title, model in models.items():
        flushed, streamed = model["schedules"], model["without_flush"]
        found: Curves = {name: [] for name in (ONE_DEVICE, MICRO_BATCHED, *flushed, *streamed)}
        for seed in seeds:
            given = config.composed([*model["overrides"], f"seed={seed}", *paths])
            data = batches(given, steps)
            for name, runs in found.items():
                runs.append(train(given, data, name, ranks, micro_batches))
        rows += list(_rows(title, found, flushed, model["tolerance"]))
        means = {name: [statistics.fmean(each) for each in zip(*runs, strict=True)] for name, runs in found.items()}
        caption = f"{title}: training loss by step, mean of {len(seeds)} seeds, and of the {LAST} steps before"
        pictures.append(curves(title, means, "step", "training loss (nats)", caption, mean_of=LAST))
    return Result.of(rows, *pictures)


def _rows(title: str, found: Curves, flushed: Sequence[str], tolerance: str) -> Iterator[Row]:
    ends = {name: [statistics.fmean(run[-LAST:]) for run in runs] for name, runs in found.items()}
    spread = statistics.stdev(ends[ONE_DEVICE]) if len(ends[ONE_DEVICE]) > 1 else 0.0
    starts = statistics.fmean(run[0] for run in found[ONE_DEVICE])
    for name, values in ends.items():
        beside = MICRO_BATCHED if name in flushed else ONE_DEVICE
        apart = [value - alone for value, alone in zip(values, ends[beside], strict=True)]
        note = f"mean {statistics.fmean(values):.4f}, by seed {', '.join(f'{value:.4f}' for value in values)}"
        what = f"{title}, {name}: loss at the end beside {beside}, same seeds, mean"
        if name == ONE_DEVICE:
            note += f"; standard deviation over seeds {spread:.4f}; at the first step {starts:.4f}"
            yield Row(f"{title}, {name}: loss at the end", None, statistics.fmean(values), unit="nats", note=note)
        elif name in flushed:
            yield Row(what, 0.0, statistics.fmean(apart), tolerance, "nats", note=note)
        elif name == MICRO_BATCHED:
            yield Row(what, None, statistics.fmean(apart), unit="nats", note=f"{note}{SEEN}")
        else:
            yield Row(what, None, statistics.fmean(apart), unit="nats", note=f"{note}; another algorithm: no claim")


def batches(given: Any, steps: int) -> list[Batch]:
    """The recipe's training batches in their order, from epoch to epoch."""
    data = job.make_data(given)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    found: list[Batch] = []
    for epoch in range(steps):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            found.append(batch)
            if len(found) == steps:
                return found
    raise AssertionError("an epoch has a batch at least")


def loss_of(module: Any, part: Batch) -> Any:
    """What the recipe's training step returns; it logs nothing here."""
    if hasattr(module, "smoothed_loss"):
        return module.smoothed_loss(module.model(part["image"]), part["label"])
    return module.loss(part)


def train(given: Any, data: Sequence[Batch], name: str, ranks: int, micro_batches: int) -> list[float]:
    """The loss of every batch.

    Args:
        given: the recipe.
        data: its batches.
        name: of a schedule, or one device.
        ranks: of the pipeline.
        micro_batches: of a batch.
    """
    torch.manual_seed(given.seed)
    module = job.make_module(given).train()
    if name in (ONE_DEVICE, MICRO_BATCHED):
        return _on_one_device(module, data, 1 if name == ONE_DEVICE else micro_batches)
    number = 1 if name == "pipedream" else micro_batches
    family = schedules.get(name).for_batches_of(number)
    loss_rank = family.build(ranks, 4 * micro_batches).loss_ranks[0]
    world = thread_world(Topology.for_schedule(ranks, loss_rank=loss_rank), timeout=timedelta(seconds=300))
    modules = [copy.deepcopy(module) for _ in world]

    def run(transport: Transport) -> list[float]:
        return _on_rank(transport, modules[transport.process], given, data, family, number)

    return [sum(each) for each in zip(*run_threads(world, run, timeout=7200), strict=True)]


def _on_one_device(module: Any, data: Sequence[Batch], number: int) -> list[float]:
    """The losses of a run that adds up the gradients of so many micro-batches."""
    losses: list[float] = []
    optimizer = _Optimizer(module, len(data))
    for batch in data:
        total = 0.0
        for part in _parts(batch, number):
            loss = loss_of(module, part) / number
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def _parts(batch: Batch, number: int) -> list[Batch]:
    """The micro-batches of a batch."""
    cut = {key: value.tensor_split(number) for key, value in batch.items()}
    return [{key: values[part] for key, values in cut.items()} for part in range(number)]


class _Optimizer:
    """The recipe's optimizer with its learning rates; parameters without a gradient stay as they are."""

    def __init__(self, module: Any, steps: int) -> None:
        from recipes.optimizers import decay_groups

        self.optimizer = module.make_optimizer(decay_groups(module, module.weight_decay))
        self.rates = module.make_scheduler(self.optimizer, steps)

    def step(self) -> None:
        """With what the gradients are, which are forgotten."""
        self.optimizer.step()
        self.rates.step()
        self.optimizer.zero_grad()


def _on_rank(
    transport: Transport, module: Any, given: Any, data: Sequence[Batch], family: Any, number: int
) -> list[float]:
    """The losses that this rank has computed; zero for those of other ranks."""
    stages = transport.topology.ranks * family.stages_per_rank
    layers = find_layers(module, given.layers)
    pipeline = Pipeline(module, layers, divide(module, layers, stages, "parameters"), family, transport)
    pipeline.partition()
    optimizer, losses = _Optimizer(module, len(data)), [0.0] * len(data)

    def take(calls: Iterable[CallResult]) -> None:
        for call in calls:
            if call.update:
                optimizer.step()
            for batch, results in call.results.items():
                losses[batch] += sum(float(value.detach()) / number for value in results.values())

    for index, batch in enumerate(data):
        call = partial(pipeline.train if family.synchronous else pipeline.advance, seed=index)
        done: Any = call(lambda _, part: loss_of(module, part), _parts(batch, number), [1 / number] * number)
        if family.synchronous:
            optimizer.step()
            losses[index] = sum(float(value.detach()) / number for value in done.values())
        else:
            take([done])
    take(pipeline.drain())
    pipeline.restore()
    return losses
