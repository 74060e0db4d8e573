"""A module that is whole until its first batch has shown its layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine import undivided
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.absent_tensor import exchange, is_absent
from lightning_pipe.partition.choice import choose
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology
from tests.support.threads import thread_world


class Net(nn.Module):
    """Registered backwards, with dropout, statistics, a counter and an average of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.out, self.norm, self.inside = nn.Linear(4, 1), nn.BatchNorm1d(4), nn.Linear(3, 4)
        self.average = nn.Parameter(torch.zeros(4, 3), requires_grad=False)

    def step(self, _: int, x: Tensor) -> Tensor:
        self.norm.calls = getattr(self.norm, "calls", 0) + 1
        with torch.no_grad():
            self.average.lerp_(self.inside.weight, 0.5)
        h = nn.functional.dropout(self.norm(self.inside(x)), 0.5)
        (slope,) = torch.autograd.grad(h.sum(), self.inside.weight, create_graph=True)
        return self.out(h).square().mean() + slope.square().mean()


def whole(schedule: str = "1f1b", ranks: int = 1, stages: int = 2) -> tuple[Pipeline, Net]:
    torch.manual_seed(0)
    module = Net()
    transport, *_ = thread_world(Topology(ranks=ranks))
    pipeline = Pipeline(module, [], [0] * stages, schedules.get(schedule), transport, deferred_batch_norm=True)
    return pipeline, module


@pytest.mark.usefixtures("float64")
def test_a_look_leaves_no_trace() -> None:
    pipeline, module = whole()
    x = torch.randn(5, 3)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    random, kept = torch.get_rng_state(), vars(module).copy()
    calls = undivided.look(pipeline, module.step, x, training=True, seed=0)
    assert [call.name for call in calls] == ["inside", "norm", "out"]
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert vars(module).keys() == kept.keys()
    assert not hasattr(module.norm, "calls")
    assert not module.norm.pending, "statistics of the batch"
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.usefixtures("float64")
def test_whoever_has_the_pipeline_goes_on_with_the_divided_one() -> None:
    pipeline, module = whole()
    pipeline.reductions.scattered = True
    assert pipeline.whole
    assert all(pipeline.owners(name) == (0,) for name, _ in module.named_parameters())
    calls = undivided.look(pipeline, module.step, torch.randn(5, 3), training=True, seed=0)
    layers = choose(module, calls, 2).layers
    undivided.divide(pipeline, layers, [1, 2], 1)
    assert not pipeline.whole
    assert pipeline.names == ["inside", "norm", "out"]
    assert pipeline.reductions.scattered
    assert len(pipeline.norms) == 1


@pytest.mark.usefixtures("float64")
def test_what_is_not_this_ranks_is_freed_in_place() -> None:
    """Optimizers that were made before refer to the same parameters."""
    pipeline, module = whole(ranks=2)
    optimizer = torch.optim.SGD(module.parameters())
    layers = [(name, getattr(module, name)) for name in ("inside", "norm", "out")]
    undivided.divide(pipeline, layers, [1, 2], 1)
    absent = {name for name, parameter in module.named_parameters() if is_absent(parameter)}
    first, second = {"inside.weight", "inside.bias"}, {"norm.weight", "norm.bias", "out.weight", "out.bias"}
    assert absent == (first if pipeline.stages_here == [1] else second)
    pairs = zip(optimizer.param_groups[0]["params"], module.parameters(), strict=True)
    assert all(before is now for before, now in pairs)


@pytest.mark.usefixtures("float64")
def test_an_evaluation_of_a_whole_module_is_that_of_one_device() -> None:
    pipeline, module = whole()
    module.eval()
    x = torch.randn(5, 3)
    step = lambda _, part: module.out(module.norm(module.inside(part)))  # noqa: E731
    found = pipeline.evaluate(step, [x])
    torch.testing.assert_close(found[0], module.out(module.norm(module.inside(x))).detach())


class Quantised(Net):
    """Averages of its own, written in every way that autograd does not count."""

    way = "copy"

    def step(self, _: int, x: Tensor) -> Tensor:
        if self.way == "copy":
            self.average.data.copy_(self.inside.weight)
        elif self.way == "data":
            self.average.data = self.inside.weight.detach() * 2
        else:
            self.average = nn.Parameter(self.inside.weight.detach() * 2, requires_grad=False)
        return self.out(self.norm(self.inside(x))).square().mean() + self.average.sum()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("way", ["copy", "data", "parameter"])
def test_a_look_puts_back_parameters_however_they_were_written(way: str) -> None:
    module = Quantised()
    module.way, average = way, module.average
    transport = SingleProcess()
    pipeline = Pipeline(module, [], [0, 0], schedules.get("1f1b"), transport)
    undivided.look(pipeline, module.step, torch.randn(5, 3), training=True, seed=0)
    assert module.average is average
    assert not average.any()


class Wrapper(nn.Module):
    """Keeps what a hook sees of a part, as those do that take features of a backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head, self.seen = backbone, nn.Linear(4, 2), torch.empty(0)
        backbone[0].register_forward_hook(self.hook)  # type: ignore[index]

    def hook(self, part: nn.Module, args: object, output: Tensor) -> None:
        self.seen = self.head(output)

    def forward(self, x: Tensor) -> Tensor:
        self.backbone(x)
        return self.seen


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        backbone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        self.net = nn.ModuleDict({"one": Wrapper(backbone), "other": Wrapper(backbone)})

    def step(self, _: int, x: Tensor) -> Tensor:
        one = self.net["one"](x)
        with torch.no_grad():
            other = self.net["other"](2 * x)
        return (one - other - self.net["one"](3 * x)).square().mean()


@pytest.mark.usefixtures("float64")
def test_nothing_is_left_of_the_graph_of_a_look() -> None:
    module = Siamese()
    pipeline = Pipeline(module, [], [0, 0], schedules.get("1f1b"), SingleProcess())
    undivided.look(pipeline, module.step, torch.randn(5, 3), training=True, seed=0)
    for parameter in module.parameters():
        exchange(parameter, nn.Parameter(torch.zeros_like(parameter)))  # raises where a graph refers to it
