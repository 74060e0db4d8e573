"""Measures what each layer costs under the engine, stage by stage on one rank."""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import SizeCosts
from lightning_pipe.schedules import Action, Family, Kind
from lightning_pipe.schedules.family import Orders
from lightning_pipe.torch_internals import tree_leaves
from lightning_pipe.transport.single_process import SingleProcess

Step = Callable[[nn.Module, Any], Any]
"""``step(module, micro_batch)`` returns the loss."""

_MICRO_BATCHES = 2


@dataclass(frozen=True)
class _InOrder(Family):
    """One rank that takes one micro-batch after the other, forward and backward."""

    halves: bool = False

    @override
    def orders(self, ranks: int, micro_batches: int) -> Orders:
        back = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if self.halves else (Kind.BACKWARD,)
        return [[Action(kind, 0, number) for number in range(micro_batches) for kind in (Kind.FORWARD, *back)]]


def measure_layers(
    module: nn.Module,
    paths: str | Sequence[str] | None,
    step: Step,
    part: Any,
    device: torch.device,
    rounds: int,
) -> tuple[SizeCosts, float]:
    """Measure on one rank how long each layer takes as a stage of its own, and all layers as one stage.

    With t_i the time of layer i as a stage and T that of all as one, each stage costs o = (sum of t_i - T) / (L - 1)
    besides its layers, and layer i costs t_i - o. So the figures give back both measurements, and what the user's
    step does besides calling layers counts with the layer that it runs beside.

    Args:
        module: measured as a copy.
        paths: the layers, as for `find_layers`.
        step: the user's step.
        part: a micro-batch.
        device: where to measure.
        rounds: batches; medians count.

    Returns:
        What the layers cost, and the seconds of the engine for each compute action.
    """
    own = copy.deepcopy(module).to(device)
    layers = find_layers(own, paths)
    count = len(layers)
    single, beside_single = _times(_pipeline(own, paths, [1] * count, device), step, own, part, rounds)
    # of one layer there is no more to measure: the first stage does not divide its pass
    whole, beside_whole, split = single, beside_single, single
    if count > 1:
        whole, beside_whole = _times(_pipeline(own, paths, [count], device), step, own, part, rounds)
        split, _ = _times(_pipeline(own, paths, [1] * count, device, halves=True), step, own, part, rounds)
    saved, boundary = _bytes(_pipeline(own, paths, [count], device), step, own, part)

    times: dict[Kind, tuple[float, ...]] = {}
    per_stage: dict[Kind, float] = {}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        alone = [single[kind, number] for number in range(count)]
        extra = 0.0 if count == 1 else max(0.0, (sum(alone) - whole[kind, 0]) / (count - 1))
        per_stage[kind] = min(extra, *alone)
        times[kind] = tuple(each - per_stage[kind] for each in alone)
    towards_input, towards_weights = (
        tuple(max(0.0, split[kind, number] - per_stage[Kind.BACKWARD] / 2) for number in range(1, count))
        for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    actions = 2 * _MICRO_BATCHES * (count - 1)
    overhead = max(0.0, (beside_single - beside_whole) / actions) if actions else 0.0
    costs = SizeCosts(
        times[Kind.FORWARD],
        times[Kind.BACKWARD],
        # the first layer is always on the first stage, whose pass is not divided
        (times[Kind.BACKWARD][0], *towards_weights),
        saved,
        boundary,
        per_stage[Kind.FORWARD],
        per_stage[Kind.BACKWARD],
        (0.0, *towards_input),
    )
    return costs, overhead


def _pipeline(
    module: nn.Module,
    paths: str | Sequence[str] | None,
    counts: list[int],
    device: torch.device,
    *,
    halves: bool = False,
) -> Pipeline:
    transport = SingleProcess(device)
    pipeline = Pipeline(module, find_layers(module, paths), counts, _InOrder(halves), transport)
    pipeline.executor.clock = settled
    return pipeline


def _train(pipeline: Pipeline, step: Step, module: nn.Module, part: Any, seed: int) -> None:
    weights = [1 / _MICRO_BATCHES] * _MICRO_BATCHES
    pipeline.train(lambda _, each: step(module, each), [part] * _MICRO_BATCHES, weights, seed=seed)
    module.zero_grad()


def _times(
    pipeline: Pipeline, step: Step, module: nn.Module, part: Any, rounds: int
) -> tuple[dict[tuple[Kind, int], float], float]:
    """Per action ``(kind, stage)``, so that they add up to a batch; and per batch what passes besides the actions."""
    _train(pipeline, step, module, part, 0)
    samples: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    beside, busy = [], []
    for number in range(rounds):
        with pipeline.recorded() as events:
            start = settled()
            _train(pipeline, step, module, part, number)
            passed = settled() - start
        for event in events:
            samples[event.kind, event.stage].append(float(event.end - event.start))
        busy.append(sum(float(event.end - event.start) for event in events))
        beside.append(passed - busy[-1])
    medians = {key: statistics.median(each) for key, each in samples.items()}
    # A batch is the sum of its actions, of which some are always slow: a sum of medians would leave these out.
    missed = statistics.median(busy) / (_MICRO_BATCHES * sum(medians.values()))
    return {key: missed * each for key, each in medians.items()}, statistics.median(beside)


def settled() -> float:
    """The host's clock when the GPU has done what it was given: before, a reading would time launches."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def _crossing_bytes(args: Any, kwargs: Any) -> int:
    """Bytes of the activations among the arguments of a layer."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Positions and masks come from the batch, which every rank has.
    return sum(tensor.nbytes for tensor in [each for each in tensors if each.requires_grad] or tensors)


def _bytes(pipeline: Pipeline, step: Step, module: nn.Module, part: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What each layer keeps for its backward pass, and what it hands to the next, in the first micro-batch.

    What autograd keeps counts at the layer that runs, what the user's step does before the first layer at that, and
    afterwards, such as the loss, at the last. What several layers keep, as the result of one and the input of the
    next, counts at the first of them. Parameters are kept anyway.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    inputs: dict[int, int] = {}
    kept: dict[int, tuple[int, int]] = {}
    done = False

    def before_layer(number: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal done
        done = done or number in inputs
        inputs.setdefault(number, _crossing_bytes(args, kwargs))

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not done and storage.data_ptr() not in parameters:
            kept.setdefault(storage.data_ptr(), (max(inputs, default=0), storage.nbytes()))
        return tensor

    with ExitStack() as hooks:
        for place, (_, called) in enumerate(pipeline.layers):
            handle = called.register_forward_pre_hook(partial(before_layer, place), with_kwargs=True)
            hooks.callback(handle.remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        _train(pipeline, step, module, part, 0)
    saved = [0.0] * len(pipeline.names)
    for layer, size in kept.values():
        saved[layer] += size
    return tuple(saved), tuple(float(inputs.get(layer + 1, 0)) for layer in range(len(saved)))
