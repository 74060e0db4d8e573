"""Lets torchmetrics in the user's step count each sample once, and every rank compute the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import Running

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.intercept.interceptor import outside_modules
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.patches import replaced
from lightning_pipe.torch_internals import tree_map
from lightning_pipe.trainer.world import World

State = tuple[dict[str, Any], int]

_forward, _reset = Metric.forward, Metric.reset


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
        gather = functools.partial(_gather, self._world.replicas)
        found = [replaced(Metric, "forward", self._forward), replaced(Metric, "reset", self._reset)]
        for metric in self._metrics:
            found.append(replaced(metric, "update", self._update(metric, metric.update)))
            found.append(replaced(metric, "compute", self._compute(metric, metric.compute)))
            # ungated: torchmetrics or the user may pickle the metric with these
            if self._world.replicas is None:
                found.append(replaced(metric, "distributed_available_fn", bool, gated=False))  # never
            elif metric.dist_sync_fn is None and metric.process_group is None:
                found.append(replaced(metric, "dist_sync_fn", gather, gated=False))
        with ExitStack() as changed:
            for each in found:
                changed.enter_context(each)
            yield

    @contextmanager
    def remembered(self) -> Iterator[dict[int, Snapshot]]:
        """Around a run of the step: the states of the metrics that it changes, as they were before."""
        self._touched = {}
        try:
            yield self._touched
        finally:
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

    def _check_known(self, metric: Metric) -> None:
        """Raise where a step asks for the result of batches that this rank has not seen."""
        if self.alike or self._forwards or self._pipeline.is_loss_rank:
            return
        raise CutError(
            f"the step computes the metric `self.{self.names[id(metric)]}` before it calls the layers of later stages, "
            "and this rank does not know what the metric has counted: the rank with the last stage updates it.",
            hint="Compute it after the last layer, or in a hook such as on_validation_epoch_end.",
        )

    def _update(self, metric: Metric, update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._touch(metric)
            given = (*args, *kwargs.values())
            if self._world.local and self.share is not None and isinstance(metric, Running):
                raise ConfigurationError(
                    f"`self.{self.names[id(metric)]}` keeps the last values that it was given. The step gives it one "
                    "for each micro-batch, so its window holds fewer batches than on one device.",
                    hint="Update the metric in on_train_batch_end, or use PipeStrategy(micro_batches=1).",
                )
            if self.share is not None and isinstance(metric, MeanMetric) and len(given) == 1 and np.ndim(given[0]) == 0:
                return update(given[0], self.share)  # one number, such as a loss: the batch's one counts once
            return update(*args, **kwargs)

        return wrapper

    def _compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._world.local:
                self._check_known(metric)
                return compute(*args, **kwargs)
            mine = ({name: getattr(metric, name) for name in metric._defaults}, metric._update_count)
            transport, members = self._pipeline.transport, self._pipeline.pipeline_members
            ranks, updates = self._pipeline.loss_ranks, self._pipeline.is_loss_rank
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

        return wrapper


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


def _gather(default: Any, tensor: Tensor, group: Any | None = None) -> list[Tensor]:
    return gather_all_tensors(tensor, group=default if group is None else group)
