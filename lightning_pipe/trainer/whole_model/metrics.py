"""Lets torchmetrics in the user's step count each sample once, and every rank compute the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.wrappers import Running

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.intercept.interceptor import outside_modules
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.patches import replaced
from lightning_pipe.torch_internals import tree_map
from lightning_pipe.trainer.world import World

State = tuple[dict[str, Any], int]

_forward, _reset, _sync, _set_attribute = Metric.forward, Metric.reset, Metric.sync, Metric.__setattr__


class Metrics:
    """The metrics of a LightningModule while a strategy runs it.

    The ranks with a loss update them. Outside a step ``compute`` first gives all ranks of the pipeline the state of
    these, so it must be called on all of them. They synchronise over the replicas alone. (torchmetrics would do so over
    all processes, most of which have seen nothing.)

    Args:
        pipeline: the LightningModule over the ranks.
        world: the processes.

    Attributes:
        alike: whether all ranks run the whole of the step that is under way.
        share: what its micro-batch counts in the batch; ``None``: it has the whole batch.

    Raises:
        ConfigurationError: a metric is part of what some ranks alone run.
    """

    def __init__(self, pipeline: Pipeline, world: World) -> None:
        self._pipeline, self._world, self.alike = pipeline, world, False
        self.share: float | None = None
        module = pipeline.module
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self.names = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
        # what they count in: their own ``forward`` calls no ``update`` of theirs (torchmetrics 1.9)
        self._windows = {id(each.base_metric): each for each in self._metrics if isinstance(each, Running)}
        if len(pipeline.pipeline_members) > 1 and not pipeline.whole:
            self._check_places(module)
        self._forwards = 0  # within how many calls of `Metric.forward` the code is, which computes the batch's value
        self._touched: dict[int, Snapshot] | None = None

    def _check_places(self, module: nn.Module) -> None:
        """Refuse metrics in layers, and in modules outside the sequence that hold parameters."""
        layers = [layer for _, layer in self._pipeline.layers]
        outside = [part for _, part in outside_modules(module, layers) if not isinstance(part, Metric)]
        for part in (part for root in (*layers, *outside) for part in root.modules()):
            if isinstance(part, Metric):
                raise ConfigurationError(
                    f"The metric '{self.names[id(part)]}' is part of a layer, or of another module with parameters: "
                    "the ranks that do not run it do not know what it counts.",
                    hint="Keep the metric in the LightningModule, and update it in the step.",
                )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a run: take over synchronisation, and see what steps do to metrics."""
        metric: Any
        found = [replaced(Metric, "forward", self._forward), replaced(Metric, "reset", self._reset)]
        found += [replaced(Metric, "sync", self._sync), replaced(Metric, "__setattr__", self._set_attribute)]
        for metric in self._metrics:
            found.append(replaced(metric, "update", partial(self._update, metric, metric.update)))
            found.append(replaced(metric, "compute", partial(self._compute, metric, metric.compute)))
        with ExitStack() as changed:
            for each in found:
                changed.enter_context(each)
            yield

    def __enter__(self) -> dict[int, Snapshot]:
        """Around a run of the step: the states of the metrics that it changes, as they were before."""
        self._touched = {}
        return self._touched

    def __exit__(self, *_: object) -> None:
        self._touched = None

    def _touch(self, metric: Metric) -> None:
        """Remember a metric's state before it changes: most runs that end early never come to a metric."""
        if self._touched is not None and id(metric) not in self._touched:
            self._touched[id(metric)] = Snapshot({"": metric})

    def _forward(self, metric: Metric, *args: Any, **kwargs: Any) -> Any:
        self._touch(metric)
        self._forwards += 1
        try:
            return _forward(metric, *args, **kwargs)
        finally:
            self._forwards -= 1

    def _reset(self, metric: Metric) -> None:
        self._touch(metric)
        _reset(metric)

    def _sync(self, metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kw: Any) -> None:
        """Over the replicas alone. The ranks of a pipeline have counted the same in callbacks and lists."""
        group = process_group or metric.process_group or self._world.replicas
        if len(self._world.replica_members) > 1:
            _sync(metric, dist_sync_fn, group, *args, **kw)

    def _set_attribute(self, metric: Metric, name: str, value: Any) -> None:
        """Refuse updates by a step of what no rank can undo, adopt or compute with the others."""
        if name == "_update_count" and self._world.local and id(metric) not in self.names:
            if name not in vars(metric):
                vars(metric)["made_by_step"] = True
            elif "made_by_step" not in vars(metric):
                raise ConfigurationError(
                    f"The step updates a {type(metric).__name__} that was no module of the LightningModule when the "
                    "run began: it is in a list, or was made or copied later, as a MetricTracker does.",
                    hint="Make it in __init__, as an attribute or in ModuleList, or update it in on_train_batch_end.",
                )
        _set_attribute(metric, name, value)

    def _update(self, metric: Metric, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._touch(metric)
        share, given = self.share if self._world.local else None, (*args, *kwargs.values())
        if share is not None and (window := self._windows.get(id(metric))) is not None:
            raise ConfigurationError(
                f"`self.{self.names[id(window)]}` keeps the last values that it was given. The step gives it one "
                "for each micro-batch, so its window holds fewer batches than on one device.",
                hint="Update the metric in on_train_batch_end, or use PipeStrategy(micro_batches=1).",
            )
        if share is not None and isinstance(metric, MeanMetric) and len(given) == 1 and np.ndim(given[0]) == 0:
            return update(given[0], share)  # one number, such as a loss: the batch's one counts once
        return update(*args, **kwargs)

    def _compute(self, metric: Metric, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        updates = self._pipeline.is_loss_rank
        if self._world.local:
            if not (updates or self.alike or self._forwards):
                raise CutError(
                    f"the step computes the metric `self.{self.names[id(metric)]}` before it calls the layers of later "
                    "stages, and this rank does not know what the metric has counted: the rank with the last stage "
                    "updates it.",
                    hint="Compute it after the last layer, or in a hook such as on_validation_epoch_end.",
                )
            return compute(*args, **kwargs)
        mine = ({name: getattr(metric, name) for name in metric._defaults}, metric._update_count)
        transport, members = self._pipeline.transport, self._pipeline.pipeline_members
        ranks = self._pipeline.loss_ranks
        states = [transport.broadcast_object(mine, transport.peers[rank], members) for rank in ranks]
        if updates and len(states) == 1:
            return compute(*args, **kwargs)
        _set(metric, _merge(metric, states) if len(states) > 1 else states[0])
        try:
            return compute(*args, **kwargs)
        finally:
            if updates:
                # what the other ranks have seen counts once, however often the result is asked for
                _set(metric, mine)


def _set(metric: Metric, state: State) -> None:
    values, count = state
    for name, value in values.items():
        setattr(metric, name, tree_map(lambda v: v.to(metric.device) if isinstance(v, Tensor) else v, value))
    metric._update_count = count
    # torchmetrics keeps the last result, which belongs to another state now
    metric._computed = None


def _merge(metric: Metric, states: Sequence[State]) -> State:
    """The state after the updates of all ranks, as torchmetrics merges those of processes."""
    merged: dict[str, Any] = {}
    reductions: dict[str, Any] = metric._reductions
    for name, reduction in reductions.items():
        values = [state[name] for state, _ in states]
        if isinstance(values[0], list):
            merged[name] = [element for value in values for element in value]
        else:
            stacked = torch.stack([value.to(metric.device) for value in values])
            merged[name] = stacked if reduction is None else reduction(stacked)
    return merged, sum(count for _, count in states)
