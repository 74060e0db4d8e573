"""Batch norm over the replicas at the same position, with torch's norm on GPUs and a model of it on CPUs."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as differentiable

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm
from lightning_pipe.parameters.sync_batchnorm import are_synchronized, synchronize
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.arrangement import open_transport
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support import processes

MICRO_BATCHES = 3
BATCH_NORM = pytest.mark.feature(
    "Trainer arguments", "sync_batchnorm", "differs", "normalises over replicas; a single pipeline as BatchNorm does"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Sequential(nn.Identity(), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh()),
        )
        self.norm = nn.SyncBatchNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.layers(x)) * torch.arange(4, device=x.device)).tanh().square().mean()


def parts_of(replica: int) -> list[Tensor]:
    """The micro-batches of a replica; those with the same number have equally many samples."""
    rows = torch.randn(14, 4, generator=torch.Generator().manual_seed(replica)).double() + replica
    return list(rows.tensor_split(MICRO_BATCHES))


def reference() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One device normalises micro-batches of both replicas together; gradients and state after two batches."""
    net = Net().double()
    net.norm.__class__ = nn.BatchNorm1d
    DeferredBatchNorm.convert(net)
    for _ in range(2):
        net.zero_grad()
        for first, second in zip(parts_of(0), parts_of(1), strict=True):
            (net(torch.cat([first, second])) * len(first) / 14).backward()
        for norm in net.modules():
            if isinstance(norm, DeferredBatchNorm):
                norm.commit()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, net.state_dict()


def modelled(norm: Any, x: Tensor) -> Tensor:
    """What torch's synchronized norm computes, without its kernels for GPUs."""
    if not norm.training or norm.process_group is None:
        return nn.modules.batchnorm._BatchNorm.forward(norm, x)
    ones = torch.ones_like(x[:, :1]).sum()
    total = differentiable.all_reduce(torch.cat([x.sum(0), ones.view(1)]), group=norm.process_group)
    mean = total[:-1] / total[-1]
    variance = differentiable.all_reduce((x - mean).square().sum(0), group=norm.process_group) / total[-1]
    norm.running_mean.fill_(torch.nan)  # the pipeline must put its own in the place
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def train(transport: Transport, recompute: Any) -> Any:
    topology = transport.topology
    groups = [dist.new_group(sorted(topology.replica_processes(rank))) for rank in range(topology.ranks)]
    module = Net().double().to(transport.device)
    undo = synchronize(module, groups[transport.rank], every=True)
    assert are_synchronized(module)
    layers = find_layers(module, "layers")
    family = schedules.get("gpipe")
    balance = [7] if topology.ranks == 1 else [4, 3]
    pipeline = Pipeline(module, layers, balance, family, transport, recompute=recompute, deferred_batch_norm=True)
    pipeline.partition()
    parts = [part.to(transport.device) for part in parts_of(transport.replica)]
    for _ in range(2):
        module.zero_grad()
        pipeline.train(lambda _, x: module(x), parts, [len(part) / 28 for part in parts])
    gradients = {n: p.grad.cpu() for n, p in module.named_parameters() if pipeline.holds(n) and p.grad is not None}
    pipeline.restore()
    undo()
    kinds = {type(part).__name__ for part in module.modules() if "Norm" in type(part).__name__}
    state = {name: value.cpu() for name, value in module.state_dict().items()}
    return gradients, state, kinds, are_synchronized(module)


def train_modelled(transport: Transport, recompute: Any) -> Any:
    nn.SyncBatchNorm.forward = modelled  # type: ignore[method-assign]
    return train(transport, recompute)


def assert_as_one_device(results: list[Any], tolerance: float) -> None:
    gradients, state = reference()
    found = {name: value for own, *_ in results for name, value in own.items()}
    assert found.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)
    for _, own, kinds, synchronized in results:
        for name, value in state.items():
            torch.testing.assert_close(own[name], value, rtol=tolerance, atol=tolerance, msg=name)
        assert kinds == {"BatchNorm1d", "SyncBatchNorm"}
        assert not synchronized


@BATCH_NORM
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_normalise_together(ranks: int) -> None:
    results = processes.run_pipeline(train_modelled, Topology.for_schedule(ranks, 2), recompute="always")
    assert_as_one_device(results, 1e-12)


@BATCH_NORM
@pytest.mark.feature("Plugins", "TorchSyncBatchNorm", "differs", "as sync_batchnorm")
@pytest.mark.feature("Plugins", "LayerSync", "differs", "as sync_batchnorm")
def test_a_single_pipeline_does_not_synchronize_its_stages() -> None:
    net = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3))
    undo = synchronize(net, None, every=True)
    again = synchronize(net, None, every=True)
    x = torch.randn(5, 3)
    torch.testing.assert_close(net[0](x), nn.BatchNorm1d(3)(x))
    assert type(net[1]) is nn.BatchNorm1d
    again()
    undo()
    assert type(net[0]) is nn.SyncBatchNorm


def test_norms_with_a_group_of_their_own_are_left_alone() -> None:
    net = copy.deepcopy(nn.SyncBatchNorm(3))
    net.process_group = "mine"
    synchronize(net, None, every=True)
    assert type(net) is nn.SyncBatchNorm
    assert net.process_group == "mine"


def test_norms_that_do_more_than_torchs_are_refused() -> None:
    class Activated(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    with pytest.raises(ConfigurationError, match="'0' is a Activated"):
        synchronize(nn.Sequential(Activated(3)), "a group", every=True)


def train_on_gpu(process: int, recompute: Any) -> Any:
    device = torch.device("cuda", process % torch.cuda.device_count())
    torch.cuda.set_device(device)
    transport = open_transport(Topology.for_schedule(2, 2), device, timedelta(seconds=30))
    return train(transport, recompute)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_replicas_normalise_together_on_gpus(recompute: str) -> None:
    """Over Gloo, so that four processes can share one GPU."""
    results = processes.run_world(train_on_gpu, 4, recompute=recompute, timeout=100)
    assert_as_one_device(results, 1e-9)
