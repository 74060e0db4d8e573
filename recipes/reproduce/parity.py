"""Whether a pipeline trains like one device: losses of the recipes on one device and under every kind of schedule."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipe import schedules
from recipes import config, job
from recipes.optimizers import decay_groups
from recipes.reproduce.results import Result, Row
from tests.support.thread_runs import stepping, trained

LAST = 10
"""Steps whose mean loss is the end of a run."""

ONE_DEVICE = "one device"
MICRO_BATCHED = "one device, same micro-batches"
"""One device that adds up the gradients of the micro-batches: what a schedule with a flush computes."""
SEEN = "; batch norm, where there is any, sees micro-batches"
Batch = dict[str, Tensor]


def parity(
    models: dict[str, dict[str, Any]], steps: int, seeds: Sequence[int], ranks: int, micro_batches: int
) -> Result:
    """The losses at the end, beside those of one device.

    Args:
        models: title -> experiment and overrides of the recipe, its schedules with and without a flush, tolerance.
        steps: of every run.
        seeds: of weights and order of the data; each gives a run for every schedule.
        ranks: of the pipelines, as threads.
        micro_batches: of a batch.
    """
    torch.set_num_threads(1)
    folder, rows = Path(tempfile.gettempdir()) / "recipes.reproduce", []
    paths = [f"paths.data={folder / 'data'}", f"paths.output={folder / 'run'}"]
    for title, model in models.items():
        flushed = model["schedules"]
        runs: dict[str, list[list[float]]] = {}
        for seed in seeds:
            given = config.composed([*model["overrides"], f"seed={seed}", *paths])
            data = batches(given, steps)
            for name in (ONE_DEVICE, MICRO_BATCHED, *flushed, *model["without_flush"]):
                runs.setdefault(name, []).append(train(given, data, name, ranks, micro_batches))
        rows += list(_rows(title, runs, flushed, model["tolerance"]))
    return Result.of(rows)


def _rows(title: str, found: dict[str, list[list[float]]], flushed: Sequence[str], tolerance: str) -> Iterator[Row]:
    ends = {name: [statistics.fmean(run[-LAST:]) for run in runs] for name, runs in found.items()}
    spread = statistics.stdev(ends[ONE_DEVICE]) if len(ends[ONE_DEVICE]) > 1 else 0.0
    starts = statistics.fmean(run[0] for run in found[ONE_DEVICE])
    for name, values in ends.items():
        beside = MICRO_BATCHED if name in flushed else ONE_DEVICE
        apart = statistics.fmean(value - alone for value, alone in zip(values, ends[beside], strict=True))
        note = f"mean {statistics.fmean(values):.4f}, by seed {', '.join(f'{value:.4f}' for value in values)}"
        what = f"{title}, {name}: loss at the end beside {beside}, same seeds, mean"
        if name == ONE_DEVICE:
            note += f"; standard deviation over seeds {spread:.4f}; at the first step {starts:.4f}"
            yield Row(f"{title}, {name}: loss at the end", None, statistics.fmean(values), unit="nats", note=note)
        elif name in flushed:
            yield Row(what, 0.0, apart, tolerance, "nats", note=note)
        else:
            note += SEEN if name == MICRO_BATCHED else "; another algorithm: no claim"
            yield Row(what, None, apart, unit="nats", note=note)


def batches(given: Any, steps: int) -> list[Batch]:
    """The recipe's training batches in their order, from epoch to epoch."""
    data = job.make_data(given)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    found: list[Batch] = []
    for epoch in range(steps):
        loader.sampler.set_epoch(epoch)
        found += loader
        if len(found) >= steps:
            break
    return found[:steps]


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
    number = 1 if name in (ONE_DEVICE, "pipedream") else micro_batches
    parts = [_parts(batch, number) for batch in data]

    def optimizer(module: Any) -> Callable[[], None]:
        made = module.make_optimizer(decay_groups(module, module.weight_decay))
        return stepping(made, module.make_scheduler(made, len(data)))

    if name in (ONE_DEVICE, MICRO_BATCHED):
        return _on_one_device(module, parts, optimizer(module))
    family = schedules.get(name).for_batches_of(number)
    return trained(module, parts, ranks, family, loss_of, optimizer, given.layers)[0]


def _on_one_device(module: Any, data: Sequence[list[Batch]], update: Callable[[], None]) -> list[float]:
    """The losses of a run that adds up the gradients of micro-batches."""
    found: list[float] = []
    for parts in data:
        losses = [loss_of(module, part) / len(parts) for part in parts]
        for loss in losses:
            loss.backward()
        update()
        found.append(sum(float(loss.detach()) for loss in losses))
    return found


def _parts(batch: Batch, number: int) -> list[Batch]:
    """The micro-batches of a batch."""
    cut = {key: value.tensor_split(number) for key, value in batch.items()}
    return [{key: values[part] for key, values in cut.items()} for part in range(number)]
