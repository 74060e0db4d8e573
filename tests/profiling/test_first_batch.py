"""Layers measured while a batch runs, without a trace, and the balance that follows."""

from __future__ import annotations

import copy
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.planning.cost_profile import CostProfile, SizeCosts
from lightning_pipe.planning.layer_sizes import without_times
from lightning_pipe.planning.profile_store import ProfileStore
from lightning_pipe.profiling.first_batch import profiled
from lightning_pipe.schedules import GPipe
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world


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
        self.seconds, self.calls = seconds, 0
        self.inner = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = Slow.apply(self.inner(x) * random.choice([0.5, 2.0]), self.seconds)
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


def train(
    net: Net, ranks: int, *, measure: bool, **options: Any
) -> tuple[SizeCosts | None, dict[str, Tensor], dict[str, Tensor], float]:
    torch.manual_seed(1)
    data = torch.randn(6, 4)

    def body(transport: ThreadTransport) -> Any:
        mine = copy.deepcopy(net)
        layers = find_layers(mine, "layers")
        pipeline = Pipeline(mine, layers, [len(layers) // ranks] * ranks, GPipe(), transport, **options)
        parts, profile = list(data.tensor_split(2)), None
        if measure:
            with profiled(pipeline) as profiler:
                pipeline.train(lambda _, x: mine(x), parts, [0.5, 0.5])
            profile = profiler.gather()
        else:
            pipeline.train(lambda _, x: mine(x), parts, [0.5, 0.5])
        gradients = {name: p.grad for name, p in mine.named_parameters() if p.grad is not None and pipeline.holds(name)}
        buffers = {name: b for name, b in mine.named_buffers() if pipeline.holds(name)}
        calls = {
            f"{name}.calls": torch.tensor(part.calls)
            for name, part in mine.named_modules()
            if type(part) is Layer and pipeline.holds(f"{name}.inner.0.weight")
        }
        return profile, gradients, buffers | {name: value for name, value in calls.items() if value}

    results = run_threads(thread_world(Topology.for_schedule(ranks)), body, timeout=30)
    gradients = {name: value for result in results for name, value in result[1].items()}
    buffers = {name: value for result in results for name, value in result[2].items()}
    return results[0][0], gradients, buffers, float(torch.rand(()))


@pytest.mark.parametrize(
    ("ranks", "recompute", "deferred_batch_norm"), [(1, "never", True), (1, "always", False), (2, "always", True)]
)
def test_layers_are_measured_without_a_trace(ranks: int, recompute: str, deferred_batch_norm: bool) -> None:
    net, options = Net(), {"recompute": recompute, "deferred_batch_norm": deferred_batch_norm}
    random.seed(1)
    profile, gradients, buffers, drawn = train(net, ranks, measure=True, **options)
    random.seed(1)
    _, plain_gradients, plain_buffers, plain_drawn = train(net, ranks, measure=False, **options)
    assert profile is not None
    assert drawn == plain_drawn
    assert gradients.keys() == plain_gradients.keys()
    if ranks == 1:  # threads share the random state
        for name, value in plain_gradients.items():
            assert torch.equal(gradients[name], value), name
    for name, value in plain_buffers.items():
        assert torch.equal(buffers[name], value) or ranks > 1, name
        assert not name.endswith(("num_batches_tracked", "calls")) or torch.equal(buffers[name], value), name
    # the embedding counts with the layer behind it, the head with the one before it
    for layer, seconds in enumerate((0.03, 0.01, 0, 0.02)):
        assert profile.forward[layer] >= seconds
        assert profile.backward[layer] >= 2 * seconds
    assert profile.forward[2] < 0.01
    assert profile.saved_bytes[1] > 3 * 900 * 4
    assert profile.boundary_bytes == (3 * 4 * 4,) * 3 + (0,)


def some_profile(net: nn.Module, forward: float) -> CostProfile:
    none = (0.0,) * 4
    costs = SizeCosts((forward, 0, 0, forward), none, none, (4, 0, 0, 0), none)
    return CostProfile(
        "Net", without_times(net, find_layers(net, "layers")).layers, {2: costs}, conditions={"threads": "2"}
    )


def test_the_balance_follows_the_measurements() -> None:
    net = Net()
    layers = find_layers(net, "layers")
    with pytest.raises(ConfigurationError, match="has not been measured"):
        divide(net, layers, 2, "time")
    costs = SizeCosts((3, 1, 0, 2), (6, 2, 0, 4), (3, 1, 0, 2), (10, 900, 10, 10), (0,) * 4)
    profile = CostProfile("Net", without_times(net, layers).layers, {1: costs})
    assert profile.layer_costs("time") == [9, 3, 0, 6]
    assert divide(net, layers, 2, "time", profile.layer_costs("time")) == [1, 3]
    assert profile.layer_costs("time", recompute=True) == [12, 4, 0, 8]
    weights = [4 * layer.parameter_bytes for layer in profile.layers]
    once, twice = (profile.layer_costs("memory", number) for number in (1, 2))
    assert once == [size + saved for size, saved in zip(weights, costs.saved_bytes, strict=True)]
    assert [b - a for a, b in zip(once, twice, strict=True)] == [10, 900, 10, 10]
    frozen = replace(profile, layers=tuple(replace(each, frozen_bytes=each.parameter_bytes) for each in profile.layers))
    assert frozen.layer_costs("memory", 0) == [layer.parameter_bytes for layer in profile.layers]


def test_a_profile_is_kept_by_the_module_and_checked_for_the_conditions(tmp_path: Path) -> None:
    net = Net()

    def store(module: nn.Module = net, threads: str = "2") -> ProfileStore:
        return ProfileStore(module, find_layers(module, "layers"), {"threads": threads}, tmp_path)

    assert store().load("threads") is None
    some_profile(net, 1).save(store().path)
    some_profile(net, 2).save(store().path)
    again = store()
    assert again.load("threads") == again.found == some_profile(net, 2)
    assert store(net, "4").load() == some_profile(net, 2)
    with pytest.raises(ConfigurationError, match="threads 2 in the profile, 4 now"):
        store(net, "4").load("threads")
    other = Net()
    other.layers.append(Layer(0, 1))
    assert store(other).load() is None
    net.layers[0].requires_grad_(False)
    found = store().load()
    assert found is not None
    assert found.layers[0].frozen_bytes > 0, "the parameters are those of now"
    net.layers[0].inner[2].p = 0.5  # an option, and no parameter
    assert store().load() is None
    assert [path.name for path in tmp_path.iterdir()] == [again.path.name], "and nothing half written"
