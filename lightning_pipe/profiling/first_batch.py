"""Measures the layers of all ranks during one training batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.intercept.recompute import BufferGuard, recomputing
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.planning.cost_profile import SizeCosts
from lightning_pipe.profiling.layers import crossing_bytes, settled
from lightning_pipe.skip import SkipKey, Store, stored_in
from lightning_pipe.torch_internals import tree_leaves, tree_map


class LayerCost(NamedTuple):
    """One layer on one micro-batch: seconds of its passes, and bytes that it keeps for the backward pass."""

    forward: float
    backward: float
    saved_bytes: int


class LayerProfiler:
    """Measures each layer and outside module when it is called for the first time.

    Args:
        pipeline: whose layers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._modules = dict(pipeline.module.named_modules())
        self._found: dict[str, tuple[int, LayerCost]] = {}
        self._inputs: dict[int, int] = {}
        self._last = 0

    def before_layer(
        self, name: str, key: int, forward: Callable[..., Any], args: Any, kwargs: Any, skips: Mapping[SkipKey, Any]
    ) -> None:
        """Measure one call, without a trace."""
        if key >= 0:
            self._last = key
            self._inputs.setdefault(key, crossing_bytes(args, kwargs))
        if name in self._found:
            return
        module = self._modules[name]
        # The call is repeated many times, and the batch must not notice: neither its random numbers, nor buffers, nor
        # attributes, nor skip tensors, nor the statistics of norms.
        streams, attributes = RandomStreams(0, self._pipeline.transport.device), Snapshot(dict(module.named_modules()))
        with recomputing(), streams.batch(), BufferGuard([module]).restored(), stored_in(_Endless(skips)):
            self._found[name] = self._last, measure(module, forward, args, kwargs)
        attributes.undo()

    def gather(self) -> SizeCosts:
        """The costs of all layers; a module outside the sequence counts with the layer it runs behind. Collective."""
        transport, number = self._pipeline.transport, len(self._pipeline.names)
        ranks = transport.all_gather_object((self._found, self._inputs), self._pipeline.pipeline_members)
        forward, backward, saved, boundary = ([0.0] * number for _ in range(4))
        for place, cost in {name: each for found, _ in ranks for name, each in found.items()}.values():
            forward[place] += cost.forward
            backward[place] += cost.backward
            saved[place] += cost.saved_bytes
        for key, size in {key: size for _, inputs in ranks for key, size in inputs.items()}.items():
            if key:
                boundary[key - 1] = float(size)
        halves = [each / 2 for each in backward]
        return SizeCosts(tuple(forward), tuple(backward), tuple(halves), tuple(saved), tuple(boundary))


def measure(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], repeats: int = 3
) -> LayerCost:
    """Time a layer alone, forward and backward, on real input.

    Gradients are not accumulated and the arguments not changed; random state and buffers are the caller's to protect.

    Args:
        module: the layer, for its parameters.
        forward: its forward.
        args: the arguments it was called with.
        kwargs: the keyword arguments.
        repeats: the fastest of so many counts.
    """
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    times: list[tuple[float, float]] = []
    saved: dict[int, int] = {}
    for repeat in range(repeats + 1):
        own_args, own_kwargs = tree_map(_copy, (args, dict(kwargs)))
        inputs = [
            leaf for leaf in tree_leaves((own_args, own_kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        start = settled()
        if repeat == 0:  # the first run warms up, and counts what is kept

            def pack(tensor: Tensor) -> Tensor:
                if not isinstance(tensor, nn.Parameter):
                    saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = forward(*own_args, **own_kwargs)
        else:
            result = forward(*own_args, **own_kwargs)
        middle = settled()
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if results and (inputs or weights):
            ones = [torch.ones_like(leaf) for leaf in results]
            torch.autograd.grad(results, [*inputs, *weights], ones, allow_unused=True)
        if repeat:
            times.append((middle - start, settled() - middle))
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = sum(size for place, size in saved.items() if place not in own)
    return LayerCost(min(t[0] for t in times), min(t[1] for t in times), kept)


def _copy(leaf: Any) -> Any:
    # Not a leaf of the graph, so that a layer may change its input in place.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad).view_as(leaf) if isinstance(leaf, Tensor) else leaf


class _Endless(Store):
    """Skip tensors that can be popped again and again."""

    @override
    def end(self, key: SkipKey) -> Tensor | None:
        return self[key]


@contextmanager
def profiled(pipeline: Pipeline) -> Iterator[LayerProfiler]:
    """Measure the layers that the training batches inside call."""
    profiler = LayerProfiler(pipeline)
    with pipeline.profiled(profiler.before_layer):
        yield profiler
