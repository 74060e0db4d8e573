"""Measures the layers of all ranks during one training batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_pipe.engine.batch import BatchObserver
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.intercept.recompute import BufferGuard, recomputing
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.partition.profile import LayerCost, Profile, measure
from lightning_pipe.skip import SkipKey, Store, stored_in


class LayerProfiler(BatchObserver):
    """Measures each layer and outside module when it is called for the first time.

    Args:
        pipeline: whose layers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._modules = dict(pipeline.module.named_modules())
        self._layers: dict[str, LayerCost] = {}
        self._beside: dict[str, int] = {}
        self._last = 0

    @override
    def before_layer(
        self, name: str, key: int, forward: Callable[..., Any], args: Any, kwargs: Any, skips: Mapping[SkipKey, Any]
    ) -> None:
        """Measure one call, without a trace."""
        if key >= 0:
            self._last = key + 1
        if name in self._layers:
            return
        module = self._modules[name]
        # The call is repeated many times, and the batch must not notice: neither its random numbers, nor buffers, nor
        # attributes, nor skip tensors, nor the statistics of norms.
        streams, attributes = RandomStreams(0, self._pipeline.transport.device), Snapshot(dict(module.named_modules()))
        with recomputing(), streams.batch(), BufferGuard([module]).restored(), stored_in(_Endless(skips)):
            self._layers[name] = measure(module, forward, args, kwargs)
        attributes.undo()
        if key < 0:
            self._beside[name] = self._last

    def gather(self) -> Profile:
        """The measurements of all ranks of the pipeline. Collective."""
        transport = self._pipeline.transport
        found = transport.all_gather_object((self._layers, self._beside), self._pipeline.pipeline_members)
        profile = Profile()
        for layers, beside in found:
            profile.layers.update(layers)
            profile.beside.update(beside)
        return profile


class _Endless(Store):
    """Skip tensors that can be popped again and again."""

    @override
    def end(self, key: SkipKey) -> Tensor | None:
        return self[key]


@contextmanager
def profiled(pipeline: Pipeline) -> Iterator[LayerProfiler]:
    """Measure the layers that the training batches inside call."""
    profiler = LayerProfiler(pipeline)
    with pipeline.observed(profiler):
        yield profiler
