"""Running statistics of whole mini-batches, whatever they were cut into."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import GPipe
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology
from tests.support.threads import Draws, ThreadTransport, run_threads, thread_world

pytestmark = pytest.mark.usefixtures("float64")


KINDS: list[tuple[type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (10, 3)),
    (nn.BatchNorm1d, (10, 3, 5)),
    (nn.BatchNorm2d, (10, 3, 4, 2)),
    (nn.BatchNorm3d, (10, 3, 2, 2, 2)),
]
OPTIONS: list[dict[str, Any]] = [{}, {"momentum": None}, {"momentum": 0.3}, {"affine": False}]


@pytest.mark.parametrize("micro_batches", [1, 3, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("kind", "shape"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_statistics_are_those_of_the_whole_batch(
    kind: Any, shape: tuple[int, ...], options: dict[str, Any], micro_batches: int
) -> None:
    plain = kind(3, **options)
    deferred = DeferredBatchNorm.convert(copy.deepcopy(plain))
    for _ in range(5):
        batch = torch.randn(shape) * 3 + 100
        plain(batch)
        for part in batch.tensor_split(micro_batches):
            deferred(part)
        deferred.commit()
    assert_same_statistics(deferred, plain)
    plain.eval()
    deferred.eval()
    torch.testing.assert_close(deferred(batch), plain(batch), rtol=0, atol=1e-10)


def assert_same_statistics(found: nn.Module, expected: nn.Module) -> None:
    for (name, value), (_, reference) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12, msg=name)


def test_without_running_statistics_nothing_is_kept() -> None:
    norm = DeferredBatchNorm.convert(nn.BatchNorm1d(3, track_running_stats=False))
    plain, batch = nn.BatchNorm1d(3, track_running_stats=False), torch.randn(4, 3)
    torch.testing.assert_close(norm(batch), plain(batch))
    norm.commit()
    assert list(norm.state_dict()) == list(plain.state_dict())


def test_the_plain_norm_comes_back() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SyncBatchNorm(4))
    keys = list(net.state_dict())
    DeferredBatchNorm.convert(net)
    assert isinstance(net[1], nn.BatchNorm2d)
    assert isinstance(net[1], DeferredBatchNorm)
    assert list(net.state_dict()) == keys
    assert type(DeferredBatchNorm.revert(net)[1]) is nn.BatchNorm2d
    assert type(net[2]) is nn.SyncBatchNorm


class Activated(nn.BatchNorm1d):
    """Does more than normalise, with torch's own function."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        weights = (self.weight, self.bias, self.training, self.momentum, self.eps)
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, *weights))


class Clamped(nn.BatchNorm1d):
    """Does more than normalise, by what it is derived from."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


class Named(nn.BatchNorm1d):
    """Has no forward of its own."""


@pytest.mark.parametrize("kind", [Activated, Clamped, Named, nn.SyncBatchNorm])
def test_norms_that_are_derived_from_torchs_keep_what_they_do(kind: Any) -> None:
    plain = kind(3)
    deferred = DeferredBatchNorm.convert(copy.deepcopy(plain))
    assert isinstance(deferred, kind)
    for _ in range(3):
        batch = torch.randn(10, 3) + 4
        plain(batch)
        for part in batch.tensor_split(3):
            torch.testing.assert_close(deferred(part), copy.deepcopy(plain)(part))
        deferred.commit()
    assert_same_statistics(deferred, plain)
    assert type(DeferredBatchNorm.revert(deferred)) is kind


class Repeating(nn.Module):
    """One norm between all layers, one in layers of two stages, one called twice by the head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(4))
        self.layers[3][1] = self.layers[0][1]
        self.between, self.head = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return self.head(x).square().mean() + (self.head(x + 1) * x).mean()


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 1), ("1f1b", 2), ("chimera", 2)])
def test_norms_that_are_called_several_times_count_every_call(schedule: str, ranks: int) -> None:
    """One micro-batch, so that all norms have the statistics of one device."""
    net, batches = Repeating(), [torch.randn(6, 3) for _ in range(3)]
    reference = copy.deepcopy(net)
    for batch in batches:
        reference(batch)
    found = train(Run(ranks, 1, 1, schedule), batches, net)[0]
    for name, value in reference.named_buffers():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_users_checkpoint_counts_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def __init__(self, net: Net, *, checkpointed: bool) -> None:
            super().__init__()
            self.layers = nn.Sequential(*map(Checkpointed, net.layers)) if checkpointed else net.layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    net, batches = Net(), [torch.randn(10, 3, 2, 2) for _ in range(2)]
    for layer in net.layers:
        layer[2] = nn.Identity()
    plain = train(Run(2, 1, 3), batches, Outer(net, checkpointed=False))[0]
    found = train(Run(2, 1, 3), batches, Outer(net, checkpointed=True))[0]
    for (name, value), other in zip(plain.items(), found.values(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-12, msg=name)


def test_evaluation_in_training_mode_is_a_mini_batch_of_its_own() -> None:
    transport = SingleProcess()
    net, plain = Net(), nn.BatchNorm2d(3)
    pipeline = Pipeline(net, find_layers(net, "layers"), [8, 8], GPipe(), transport, deferred_batch_norm=True)
    for _ in range(2):
        batch, other = torch.randn(4, 3, 2, 2), torch.randn(6, 3, 2, 2)
        pipeline.evaluate(lambda _, part: net(part), [batch])
        pipeline.train(lambda _, part: net(part), [other], [1.0])
        plain(batch)
        plain(other)
    assert_same_statistics(DeferredBatchNorm.revert(net).layers[0][1], plain)


def test_one_value_per_channel_is_refused() -> None:
    norm = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    with pytest.raises(ConfigurationError, match="more than one value per channel"):
        norm(torch.randn(1, 3))


def test_the_pipeline_leaves_norms_as_it_found_them_when_a_step_fails() -> None:
    transport = SingleProcess()
    net = Net()
    pipeline = Pipeline(net, find_layers(net, "layers"), [8, 8], GPipe(), transport, deferred_batch_norm=True)
    calls = 0

    def step(index: int, part: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("the user's own")
        return net(part)

    parts = list(torch.randn(8, 3, 2, 2).tensor_split(2))
    with pytest.raises(KeyError):
        pipeline.train(step, parts, [0.5, 0.5])
    assert all(not norm.pending for norm in net.modules() if isinstance(norm, DeferredBatchNorm))
    pipeline.train(step, parts, [0.5, 0.5])
    assert int(net.layers[0][1].num_batches_tracked) == 1


class Net(nn.Module):
    """The first norm sees the batch itself, so its statistics are known exactly; one norm stands outside the layers."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(nn.Identity(), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.Tanh())
        others = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Draws(), nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList([first, *others])
        self.outside = nn.BatchNorm2d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.outside(x), x)


@dataclass(frozen=True)
class Run:
    """How to train."""

    ranks: int = 1
    replicas: int = 1
    micro_batches: int = 1
    schedule: str = "gpipe"
    recompute: Any = "never"


def train(run: Run, batches: list[Tensor], net: nn.Module) -> list[dict[str, Tensor]]:
    family = schedules.get(run.schedule)
    loss_rank = family.build(run.ranks, run.micro_batches).loss_ranks[0]

    def body(transport: ThreadTransport) -> dict[str, Tensor]:
        mine = copy.deepcopy(net)
        sequence = find_layers(mine, "layers")
        stages = run.ranks * family.stages_per_rank
        balance = [len(sequence) // stages] * stages
        pipeline = Pipeline(
            mine, sequence, balance, family, transport, recompute=run.recompute, deferred_batch_norm=True
        )
        pipeline.partition()
        for batch in batches:
            part = batch.tensor_split(run.replicas)[transport.replica]
            parts = list(part.tensor_split(run.micro_batches))
            pipeline.train(lambda _, x: mine(x), parts, [len(p) / len(batch) for p in parts])
            mine.eval()
            with torch.no_grad():
                pipeline.evaluate(lambda _, x: mine(x), [batch])
            mine.train()
        pipeline.restore()
        return mine.state_dict()

    topology = Topology(run.ranks, run.replicas, loss_rank=loss_rank)
    return run_threads(thread_world(topology), body, timeout=30)


RUNS = [
    *(Run(2, replicas, m, recompute=again) for replicas in (1, 2) for m in (1, 3, 4) for again in ("never", "always")),
    Run(2, 1, 7, recompute="except_last"),
    Run(4, 1, 7, "1f1b", "always"),
    Run(2, 1, 4, "chimera", "always"),
    Run(2, 1, 7, "chimera"),
    Run(4, 2, 3, "chimera"),
    Run(2, 1, 1, "chimera"),
]
FAST = [
    Run(2, 2, 3, recompute="always"),
    Run(2, 1, 7, "chimera"),
]


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run in FAST else pytest.mark.slow) for run in RUNS], ids=str
)
def test_replicas_and_twins_share_one_mini_batch(run: Run) -> None:
    net, batches = Net(), [torch.randn(10, 3, 2, 2) * 2 + 5 for _ in range(3)]
    reference = nn.BatchNorm2d(3)
    for batch in batches:
        reference(batch)
    results = train(run, batches, net)
    for found in results:
        for name, value in reference.state_dict().items():
            if name.startswith("running") or name == "num_batches_tracked":
                torch.testing.assert_close(found[f"layers.0.1.{name}"], value, rtol=1e-12, atol=1e-12)
        assert int(found["outside.num_batches_tracked"]) == 3
    # All processes have the same module again, to the last bit.
    for found in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, found[name]), name
