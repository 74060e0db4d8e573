"""PipeDream's dynamic program against all divisions of small modules."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from lightning_pipe.planning.cost_profile import CostProfile, LayerSizes, SizeCosts
from lightning_pipe.planning.replicated import replicated_stages
from lightning_pipe.planning.search import search
from lightning_pipe.simulate import Link


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many positive ones."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in compositions(total - first, parts - 1))


def profile(draw: random.Random, layers: int) -> CostProfile:
    def numbers(scale: float) -> tuple[float, ...]:
        return tuple(draw.random() * scale for _ in range(layers))

    costs = SizeCosts(numbers(1), numbers(2), numbers(1), numbers(1), numbers(1), 0.01, 0.01)
    sizes = tuple(LayerSizes(str(layer), 1, draw.randrange(1, 1000)) for layer in range(layers))
    return CostProfile("Net", sizes, {1: costs}, Link(0.1, 0.5), Link(0.05, draw.random() / 300), 0.001)


def slowest(costs: CostProfile, layers: tuple[int, ...], replicas: tuple[int, ...]) -> float:
    at, start, times = costs.at(1), 0, []
    for number, copies in zip(layers, replicas, strict=True):
        span = slice(start, start + number)
        compute = sum(at.forward[span]) + sum(at.backward[span]) + 0.02 + 0.002
        weights = sum(layer.parameter_bytes for layer in costs.layers[span])
        times.append(max(compute, float(costs.all_reduce.all_reduce(weights, copies))) / copies)
        start += number
        if start < len(costs.layers):
            times.append(2 * float(costs.message.message(at.boundary_bytes[start - 1])))
    return max(times)


def test_no_division_is_faster() -> None:
    draw = random.Random(0)
    for _ in range(20):
        costs, ranks = profile(draw, 5), draw.randrange(1, 6)
        found = replicated_stages(costs, ranks, 1)
        assert (sum(found.layers), sum(found.replicas)) == (5, ranks)
        assert slowest(costs, found.layers, found.replicas) == pytest.approx(found.seconds)
        every = [
            slowest(costs, layers, replicas)
            for stages in range(1, min(5, ranks) + 1)
            for layers in compositions(5, stages)
            for replicas in compositions(ranks, stages)
        ]
        assert found.seconds == pytest.approx(min(every))


def test_the_search_tries_it_if_pipedream_is_named() -> None:
    """Convolutions that compute much beside a classifier with most of the parameters: PipeDream's own example."""
    costs = SizeCosts((1.0, 1.0, 1.0, 0.9), (2.0, 2.0, 2.0, 1.8), (1.0,) * 4, (0.0,) * 4, (0.0,) * 4)
    sizes = tuple(LayerSizes(str(layer), 1, 4 if layer < 3 else 4000) for layer in range(4))
    net = CostProfile("Net", sizes, {1: costs}, Link(), Link(0, 0.01))
    found = search(net, 4, 4, families=["pipedream"], pipeline_parallel_size=4, micro_batches=[4])
    labels = [choice.configuration.family.label for choice in found.choices]
    assert "pipedream replicas=(3, 1)" in labels
    chosen = next(choice for choice in found.choices if "replicas" in choice.configuration.family.label)
    assert chosen.layers == (3, 1)
    assert chosen.options["schedule"].replicas == (3, 1)
