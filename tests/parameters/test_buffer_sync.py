"""Buffers that layers change are the same on all processes that hold them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.tensor_state import same_values
from lightning_pipe.parameters.buffer_sync import EvaluatedCopies, marks
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world


class Layer(nn.Module):
    """Follows the mean of its input by replacing a buffer, counts in place, and has a buffer that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.rows += len(x)
        return torch.tanh(self.linear(x + self.mean)) * self.scale


class Unseen(Layer):
    """Changes a buffer past autograd, which counts no change."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows.data += x.sum().detach()
        return torch.tanh(self.linear(x))


class Plain(Layer):
    """Changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(
    schedule: str, replicas: int, layer: type[Layer] = Layer, net: Callable[[type[Layer]], nn.Module] = Net
) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    net, batches = net(layer), [torch.randn(8, 4) for _ in range(3)]

    def body(transport: ThreadTransport) -> dict[str, Tensor]:
        mine = copy.deepcopy(net)
        pipeline = Pipeline(mine, find_layers(mine, "layers"), [2, 2], schedules.get(schedule), transport)
        pipeline.partition()
        for batch in batches:
            parts = list(batch.tensor_split(replicas)[transport.replica].tensor_split(2))
            pipeline.train(lambda _, x: mine(x), parts, [len(part) / 8 for part in parts])
        held = [name for name, _ in mine.named_buffers() if pipeline.holds(name)]
        return {name: buffer.clone() for name, buffer in mine.named_buffers() if name in held}

    loss_rank = schedules.get(schedule).build(2, 2).loss_ranks[0]
    return run_threads(thread_world(Topology(2, replicas, loss_rank)), body, timeout=30)


def assert_equal_copies(results: list[dict[str, Tensor]], copies: int) -> None:
    for name in {name for own in results for name in own}:
        values = [own[name] for own in results if name in own]
        assert len(values) == copies
        assert all(torch.equal(value, values[0]) for value in values), name


def test_replicas_have_the_values_of_the_first_one() -> None:
    with pytest.warns(UserWarning, match=r"'layers\.0\.mean' \(8 such tensors\) is changed .* 2 times in a batch"):
        results = train("1f1b", replicas=2)
    assert_equal_copies(results, copies=2)
    assert float(results[0]["layers.2.rows"]) == 3 * 4


class Headed(Net):
    """A module outside the layers has the buffers that change."""

    def __init__(self, layer: type[Layer]) -> None:
        super().__init__(Plain)
        self.head = layer()

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        return self.head(x).square().mean()


class Framed(Headed):
    """That module is used before the layers, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.head(x))


class Decided(Headed):
    """The step itself, and a module without parameters, follow what the layers compute."""

    def __init__(self, layer: type[Layer]) -> None:
        super().__init__(layer)
        self.head.linear = nn.Identity()  # type: ignore[assignment]
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        loss = (self.head(x) - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
        return loss


@pytest.mark.parametrize(("net", "name"), [(Headed, "head.mean"), (Decided, "head.mean"), (Decided, "center")])
def test_replicas_have_the_first_ones_values_outside_layers(net: type[Net], name: str) -> None:
    with pytest.warns(UserWarning, match=r"'\w+(\.mean)?' \(\d such tensors\) is changed"):
        results = train("1f1b", replicas=2, net=net)
    assert_equal_copies([{name: own[name]} for own in results if name in own], copies=2)


@pytest.mark.parametrize(("net", "schedule"), [(Headed, "chimera"), (Framed, "1f1b")])
def test_modules_outside_layers_that_several_ranks_run_keep_their_buffers(net: type[Net], schedule: str) -> None:
    """Each rank has a copy, which changes by the calls there alone."""
    with pytest.raises(CutError, match=r"changes `self\.head\.rows`, which several processes hold"):
        train(schedule, replicas=1, layer=Unseen, net=net)


class Centred(nn.Module):
    """The outermost module follows the mean of what its layers compute, as center losses and queues do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        distance = (x - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
        return distance


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_buffers_of_the_step_are_named(micro_batches: int) -> None:
    def body(transport: ThreadTransport) -> None:
        net = Centred()
        pipeline = Pipeline(net, find_layers(net, "layers"), [2, 2], schedules.get("1f1b"), transport)
        pipeline.partition()
        parts = list(torch.randn(8, 4).tensor_split(micro_batches))
        pipeline.train(lambda _, x: net(x), parts, [1 / len(parts)] * len(parts))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(thread_world(Topology(2, 1, 1)), body, timeout=30)
    found = [str(each.message) for each in caught if "such tensors" in str(each.message)]
    assert [text.startswith("'center' (1 such tensors) is changed") for text in found] == [True] * (micro_batches - 1)


def test_buffers_that_change_in_copies_of_several_pipes_are_an_error() -> None:
    """Each of several pipes would go on from the value that its own micro-batches have made."""
    with pytest.raises(CutError, match=r"changes `self\.layers\.\d\.mean`, which several processes hold"):
        train("chimera", replicas=1)


class Normed(Plain):
    """Keeps the statistics of micro-batches: the pipeline is not told to defer them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # type: ignore[assignment]


@pytest.mark.parametrize(("schedule", "replicas"), [("1f1b", 2), ("chimera", 1), ("chimera", 2)])
def test_statistics_of_micro_batches_are_those_of_the_first_holder(
    schedule: str, replicas: int, recwarn: pytest.WarningsRecorder
) -> None:
    """The user has asked for them: nobody warns of them."""
    found = train(schedule, replicas, layer=Normed)
    assert [str(each.message) for each in recwarn if "forward passes" in str(each.message)] == []
    for layer in range(4):
        name = f"layers.{layer}.linear.1.running_mean"
        copies = [state[name] for state in found if name in state]
        assert len(copies) == replicas * (1 if schedule == "1f1b" else 2)
        assert all(torch.equal(each, copies[0]) for each in copies)
        assert copies[0].any()


def test_changes_of_data_are_seen() -> None:
    with pytest.warns(UserWarning, match=r"'layers\.0\.rows' \(4 such tensors\) is changed"):
        assert_equal_copies(train("1f1b", replicas=2, layer=Unseen), copies=2)
    with pytest.raises(CutError, match=r"changes `self\.layers\.0\.rows`, which several processes hold"):
        train("chimera", replicas=1, layer=Unseen)


class Codes(Layer):
    """Follows its input by a parameter, in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.follow(x.detach().mean(0))
        return torch.tanh(self.linear(x - self.mean))

    def follow(self, mean: Tensor) -> None:
        self.mean.lerp_(mean, 0.5)


class SetCodes(Codes):
    def follow(self, mean: Tensor) -> None:
        self.mean = nn.Parameter(0.5 * self.mean + 0.5 * mean, requires_grad=False)  # type: ignore[assignment]


class DataOfCodes(Codes):
    def follow(self, mean: Tensor) -> None:
        self.mean.data.lerp_(mean, 0.5)


class Limited(Layer):
    """A table whose rows are scaled where they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + self.table((x.sum(1) > 0).long())))


@pytest.mark.parametrize(
    ("layer", "name"), [(Codes, "mean"), (SetCodes, "mean"), (DataOfCodes, "mean"), (Limited, "table.weight")]
)
def test_parameters_that_change_in_forward_passes_have_one_holder(layer: type[Layer], name: str) -> None:
    """Copies would have other values, and nobody would see it."""
    with pytest.warns(UserWarning, match=rf"'layers\.0\.{name}' \(4 such tensors\) is changed .* 2 times in a batch"):
        train("1f1b", replicas=1, layer=layer)
    for schedule, replicas in ("1f1b", 2), ("chimera", 1):
        with pytest.raises(CutError, match=rf"changes `self\.layers\.\d\.{name}`, which several") as error:
            train(schedule, replicas, layer)
        assert "on_train_batch_end" in str(error.value)


class Masked(Layer):
    """A pruned layer."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(torch.eye(4))
        return torch.tanh(self.linear(x))


def test_what_all_holders_change_alike_stays() -> None:
    train("chimera", 2, Masked)


class LateCodes(Codes):
    calls = 0

    def follow(self, mean: Tensor) -> None:
        self.calls += 1
        if self.calls > 2:  # behind the first batch
            super().follow(mean)


def test_what_changes_in_later_batches_is_seen_too() -> None:
    with pytest.raises(CutError, match=r"changes `self\.layers\.\d\.mean`, which several"):
        train("1f1b", 2, LateCodes)


def test_marks_take_little_memory() -> None:
    """A table of a large model has a gigabyte; in the type of the sum it has four."""
    module = nn.Embedding(1 << 14, 1 << 10, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        before = marks(module)
    assert max(event.cpu_memory_usage for event in seen.events()) <= module.weight.nbytes
    module.weight.data[-1, -1] += 1
    assert not torch.equal(before["weight"], marks(module)["weight"])


class Quantized(Tensor):
    """As those of quantizing libraries: it has few functions of tensors."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.sum, Tensor.ravel, Tensor.double, torch.split):
            raise NotImplementedError(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_marks_of_what_has_no_sum() -> None:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Quantized), requires_grad=False)  # type: ignore[arg-type]
    before = marks(module)["weight"]
    assert same_values(before, marks(module)["weight"])
    assert before[-1] != before[-1]  # no holder is known to have changed it as another one
    module.weight.add_(1)
    assert not same_values(before, marks(module)["weight"])


class Kept(nn.Module):
    """A buffer that is computed anew in every pass and stays what it is; batch norm; a normalised weight."""

    def __init__(self, normalise: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        if normalise:
            nn.utils.parametrizations.spectral_norm(self.linear)
        self.register_buffer("positions", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        self.positions = torch.arange(4.0)
        return self.norm(self.linear(x + self.positions))


def told(normalise: bool, micro_batches: int) -> list[str]:
    """The warnings of a batch on one rank with two stages."""
    torch.manual_seed(0)
    net = nn.Sequential(Kept(normalise), Kept(normalise))
    transport = SingleProcess()
    pipeline = Pipeline(net, find_layers(net), [1, 1], schedules.get("gpipe"), transport, deferred_batch_norm=True)
    parts = list(torch.randn(8, 4).tensor_split(micro_batches))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.train(lambda _, x: net(x).square().mean(), parts, [1 / micro_batches] * micro_batches)
    return [str(each.message) for each in caught if "forward passes" in str(each.message)]


def test_the_user_is_told_of_what_sees_micro_batches() -> None:
    assert not told(normalise=False, micro_batches=2)
    assert not told(normalise=True, micro_batches=1)
    (message,) = told(normalise=True, micro_batches=2)
    assert "'0.linear.parametrizations.weight.0._u' (4 such tensors) is changed by forward passes: 2 times" in message


def test_copies_that_an_evaluation_has_not_run_take_over_what_it_has_changed() -> None:
    net = Net(Layer)

    def body(transport: ThreadTransport) -> dict[str, Tensor]:
        mine = copy.deepcopy(net)
        copies = EvaluatedCopies(mine, transport, (0, 1))
        copies.begin()
        layer: Any = mine.layers[transport.rank]  # each rank has run one of the layers that both have
        layer(torch.ones(2, 4))
        layer.scale = torch.ones(3)  # another shape
        copies.end()
        return dict(mine.named_buffers())

    one, two = run_threads(thread_world(Topology(2)), body)
    for name, value in one.items():
        assert torch.equal(value, two[name])
        ran = name.startswith(("layers.0", "layers.1"))
        assert torch.equal(value, dict(net.named_buffers())[name]) != ran, name
    assert one["layers.0.rows"] == one["layers.1.rows"] == 2
