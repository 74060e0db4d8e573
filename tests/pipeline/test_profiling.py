"""Layers measured while a batch runs, without a trace, and the balance that follows."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import LayerCost, Profile, ProfileStore, divide, find_layers
from lightning_pipe.pipeline.memory_transport import MemoryTransport, memory_world, run_threads
from lightning_pipe.pipeline.profiling import profiled
from lightning_pipe.pipeline.runner import Pipeline
from lightning_pipe.pipeline.topology import Topology
from lightning_pipe.schedules import GPipe


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Slow.apply(self.inner(x), self.seconds)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Layer(0.03, 4)
        self.layers = nn.ModuleList(
            Layer(seconds, width) for seconds, width in ((0, 4), (0.01, 900), (0, 4), (0.02, 4))
        )
        self.head = Layer(0.0, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def train(net: Net, ranks: int, *, measure: bool) -> tuple[Profile | None, dict[str, Tensor], dict[str, Tensor], float]:
    torch.manual_seed(1)
    data = torch.randn(6, 4)

    def body(transport: MemoryTransport) -> Any:
        mine = copy.deepcopy(net)
        layers = find_layers(mine, "layers")
        pipeline = Pipeline(mine, layers, [len(layers) // ranks] * ranks, GPipe(), transport)
        parts, profile = list(data.tensor_split(2)), None
        if measure:
            with profiled(pipeline) as profiler:
                pipeline.train(lambda _, x: mine(x), parts, [0.5, 0.5])
            profile = profiler.gather()
        else:
            pipeline.train(lambda _, x: mine(x), parts, [0.5, 0.5])
        gradients = {name: p.grad for name, p in mine.named_parameters() if p.grad is not None and pipeline.holds(name)}
        buffers = {name: b for name, b in mine.named_buffers() if pipeline.holds(name)}
        return profile, gradients, buffers

    results = run_threads(memory_world(Topology.for_schedule(ranks)), body, timeout=30)
    gradients = {name: value for result in results for name, value in result[1].items()}
    buffers = {name: value for result in results for name, value in result[2].items()}
    return results[0][0], gradients, buffers, float(torch.rand(()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_are_measured_without_a_trace(ranks: int) -> None:
    net = Net()
    profile, gradients, buffers, random = train(net, ranks, measure=True)
    _, plain_gradients, plain_buffers, plain_random = train(net, ranks, measure=False)
    assert profile is not None
    assert random == plain_random
    assert gradients.keys() == plain_gradients.keys()
    if ranks == 1:  # threads share the random state
        for name, value in plain_gradients.items():
            assert torch.equal(gradients[name], value), name
    for name, value in plain_buffers.items():
        assert torch.equal(buffers[name], value) or ranks > 1, name
    assert profile.beside == {"embed": 0, "head": 4}
    for name, seconds in {"layers.1": 0.01, "layers.3": 0.02, "embed": 0.03}.items():
        measured = profile.layers[name]
        assert measured.forward >= seconds
        assert measured.backward >= 2 * seconds
    assert profile.layers["layers.1"].saved_bytes > 3 * 900 * 4
    assert profile.layers["layers.1"].parameter_bytes == sum(p.nbytes for p in net.layers[1].parameters())


def test_the_balance_follows_the_measurements(tmp_path: Path) -> None:
    net = Net()
    layers = find_layers(net, "layers")
    with pytest.raises(ConfigurationError, match="has not been measured"):
        divide(net, layers, 2, "time")
    costs = {"embed": (3, 10), "layers.0": (0, 10), "layers.1": (1, 900), "layers.2": (0, 10), "layers.3": (2, 10)}
    profile = Profile(
        {name: LayerCost(time, 2 * time, size, size) for name, (time, size) in costs.items()}, {"embed": 0}
    )
    assert profile.costs([name for name, _ in layers], "time") == [9, 3, 0, 6]
    assert divide(net, layers, 2, "time", profile) == [1, 3]
    assert profile.costs([name for name, _ in layers], "memory", in_flight=2) == [120, 5400, 60, 60]
    assert divide(net, layers, 3, "memory", profile) == [1, 1, 2]
    store = ProfileStore(tmp_path)
    assert store.load(net, layers) is None
    store.save(net, layers, "a batch", profile)
    assert store.load(net, layers) == profile
    other = Net()
    other.layers.append(Layer(0, 1))
    assert store.load(other, find_layers(other, "layers")) is None
