"""torchmetrics in the user's step: each sample counts once, and every rank can compute the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_pipe.state import Memory

Share = Callable[[Any], Any]


class Metrics:
    """The metrics of a LightningModule while a strategy runs it.

    Only the rank with the loss updates them. Outside a step ``compute`` first gives all ranks of the pipeline the state
    of that rank, so it must be called on all of them. They synchronise over the replicas alone. (torchmetrics would do
    so over all processes, most of which have seen nothing.)

    Args:
        module: the LightningModule.
        share: collective over the pipeline; returns on all ranks what the rank with the loss passes.
        replicas: the process group of this rank's replicas; ``None`` if there is one replica.
    """

    def __init__(self, module: nn.Module, share: Share, replicas: Any | None) -> None:
        self.names = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._share, self._replicas = share, replicas
        self._in_step = False
        self._touched: dict[int, Memory] | None = None
        self._before: list[tuple[Metric, dict[str, Any]]] = []

    def install(self) -> None:
        """Take over synchronisation."""
        for metric in self._metrics:
            replaced = ("update", "compute", "distributed_available_fn", "dist_sync_fn")
            self._before.append((metric, {name: vars(metric)[name] for name in replaced}))
            metric.update = functools.wraps(metric.update)(self._update(metric, metric.update))
            metric.compute = functools.wraps(metric.compute)(self._compute(metric, metric.compute))
            if self._replicas is None:
                metric.distributed_available_fn = _never
            elif metric.dist_sync_fn is None and metric.process_group is None:
                metric.dist_sync_fn = functools.partial(_gather, self._replicas)

    def remove(self) -> None:
        """Leave the metrics as they were found."""
        for metric, attributes in self._before:
            for name, value in attributes.items():
                setattr(metric, name, value)
        self._before = []

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around a batch: ``compute`` is local."""
        self._in_step = True
        forward, reset = Metric.forward, Metric.reset
        Metric.forward = self._touching(forward)  # type: ignore[method-assign]
        Metric.reset = self._touching(reset)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Metric.forward, Metric.reset = forward, reset  # type: ignore[method-assign]
            self._in_step = False

    @contextmanager
    def remembered(self) -> Iterator[dict[int, Memory]]:
        """Around a run of the step: the states of the metrics that it changes, as they were before."""
        self._touched = {}
        try:
            yield self._touched
        finally:
            self._touched = None

    def _touch(self, metric: Metric) -> None:
        """Remember a metric's state before it changes. Most runs that are cut short never come to a metric."""
        if self._touched is not None and id(metric) not in self._touched:
            self._touched[id(metric)] = Memory({"": metric})

    def _touching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            self._touch(metric)
            return method(metric, *args, **kwargs)

        return wrapper

    def _update(self, metric: Metric, update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._touch(metric)
            return update(*args, **kwargs)

        return wrapper

    def _compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self._in_step:
                self._fetch(metric)
            return compute(*args, **kwargs)

        return wrapper

    def _fetch(self, metric: Metric) -> None:
        mine = ({name: getattr(metric, name) for name in metric._defaults}, metric._update_count)
        state, count = self._share(mine)
        if state is mine[0]:
            return
        for name, value in state.items():
            setattr(metric, name, tree_map(lambda v: v.to(metric.device) if isinstance(v, Tensor) else v, value))
        metric._update_count = count
        metric._computed = None


def _never() -> bool:
    return False


def _gather(default: Any, tensor: Tensor, group: Any | None = None) -> list[Tensor]:
    return gather_all_tensors(tensor, group=default if group is None else group)
