"""Layers measured while a batch runs, without a trace, and the balance that follows."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.layer_profiler import profiled
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import LayerCost, Profile, ProfileStore, divide, find_layers
from lightning_pipe.schedules import GPipe
from lightning_pipe.transport.threads import ThreadTransport, run_threads, thread_world
from lightning_pipe.transport.topology import Topology


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
) -> tuple[Profile | None, dict[str, Tensor], dict[str, Tensor], float]:
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
            f"{name}.calls": torch.tensor(part.calls) for name, part in mine.named_modules() if type(part) is Layer
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
    assert profile.costs([name for name, _ in layers], "time", recompute=True) == [12, 4, 0, 8]
    assert divide(net, layers, 3, "memory", profile, in_flight=1) == [1, 1, 2]


def some_profile(net: nn.Module, forward: float) -> Profile:
    return Profile({name: LayerCost(forward, 2.0, 3, 4) for name, _ in find_layers(net, "layers")}, {})


def test_profiles_are_stored_by_module_conditions_and_batch_signature(tmp_path: Path) -> None:
    net = Net()

    def store(module: nn.Module = net, *conditions: str) -> ProfileStore:
        return ProfileStore(module, find_layers(module, "layers"), conditions, tmp_path)

    assert store().load() is None
    store().save("a", some_profile(net, 1))
    store().save("b", some_profile(net, 2))
    assert store().load() == some_profile(net, 2)
    store().save("a")  # used again
    again = store()
    assert again.load() == some_profile(net, 1)
    assert again.signatures == ["b", "a"]
    other = Net()
    other.layers.append(Layer(0, 1))
    assert store(other).load() is None
    assert store(net, "another device").load() is None
    net.layers[0].inner[2].p = 0.5  # an option, and no parameter
    assert store().load() is None
    for number in range(40):
        store().save(str(number), some_profile(net, number))
    assert again.path.is_file()
    latest = store()
    latest.load()
    assert latest.signatures == [str(number) for number in range(24, 40)]


@pytest.mark.parametrize("content", ["{", "[]", '{"a": {}}', '{"a": {"layers": {"x": {"seconds": 1}}, "beside": {}}}'])
def test_a_file_that_cannot_be_read_is_ignored_and_replaced(tmp_path: Path, content: str) -> None:
    net = Net()
    store = ProfileStore(net, find_layers(net, "layers"), folder=tmp_path)
    store.path.write_text(content)
    with pytest.warns(UserWarning, match="cannot be read"):
        found = store.load()
    assert found is None
    with pytest.warns(UserWarning, match="cannot be read"):
        store.save("a", some_profile(net, 1))
    assert store.load() == some_profile(net, 1)


def test_a_folder_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    net, taken = Net(), tmp_path / "file"
    taken.write_text("")
    store = ProfileStore(net, find_layers(net, "layers"), folder=taken / "folder")
    with pytest.warns(UserWarning, match="cannot be stored"):
        store.save("a", some_profile(net, 1))
