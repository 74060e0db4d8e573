"""Replicas, evaluation and the decisions that all stages take together."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipe import PipeStrategy
from lightning_pipe.trainer.world import Connection
from tests.support import oracle
from tests.support.lit_modules import Data, Lit, dataset
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet
from tests.support.user_modules import OwnSGD

SIZES = ([8, 8, 8], [8, 4, 4])
"""Samples of the batches of two replicas."""

SHORT = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0}


def trainer(strategy: Any, devices: int = 1, **options: Any) -> L.Trainer:
    quiet()
    L.seed_everything(7, verbose=False)
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **(SHORT | options))


def test_a_copy_of_the_process_closes_nothing() -> None:
    closed: list[int] = []
    transport: Any = SimpleNamespace(board=None, close=lambda: closed.append(1))
    connection = Connection(transport)
    if (copy := os.fork()) == 0:
        with suppress(Exception):
            connection.end()
        os._exit(len(closed))
    assert os.waitpid(copy, 0)[1] == 0
    connection.end()
    assert closed == [1]


def left_by(process: int, strategies: list[dict[str, Any]]) -> list[tuple[bool, int]]:
    """After each of several Trainers: whether something of it is left, and how many threads this process has."""
    left = []
    for options in strategies:
        lit, strategy = AllSGD().double(), PipeStrategy(layers="model", micro_batches=2, **options)
        run = trainer(strategy, devices=2)
        run.fit(lit, Data())
        objects = [weakref.ref(each) for each in (lit, run, strategy, run.optimizers[0], next(lit.parameters()))]
        del lit, strategy, run
        gc.collect()
        left.append((any(each() is not None for each in objects), len(os.listdir("/proc/self/task"))))
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_several_trainers_of_a_process_share_its_connections() -> None:
    """As in a search for options: nothing of those that have ended is left, and no group of theirs with its threads."""
    options = [{}, {"schedule": "gpipe"}, {"data_parallel_size": 2}, {"schedule": "pipedream_2bw"}, {}]
    for left in run_trainers(left_by, 2, timeout=120, strategies=options):
        assert not any(anything for anything, _ in left)
        threads = [number for _, number in left]
        assert threads[0] == threads[1] < threads[2]
        assert threads[3:] == threads[2:3] * 2


# ------------------------------------------------------------------ replicas


class AllSGD(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Replicated(OwnSGD):
    """Logs over replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("mean", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("rows", float(len(x)), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        self.log("accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("gathered", self.all_gather(loss.detach()).mean(), on_step=True, on_epoch=False)
        strategy: Any = self.trainer.strategy
        self.log("computed", self.train_accuracy.compute(), on_step=True, on_epoch=False)
        self.log("told", float(strategy.broadcast(strategy.data_parallel_rank, 3)), on_step=True, on_epoch=False)
        any_of_them = strategy.reduce_boolean_decision(strategy.data_parallel_rank == 1, all=False)
        self.log("agreed", float(any_of_them), on_step=True, on_epoch=False)
        return loss


class Ordered(Data):
    """Batches in a fixed order, the same for all replicas."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(dataset(28), batch_size=8)


class Uneven(Data):
    """Every replica has batches of its own, of different sizes."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(dataset(40), batch_sampler=indices(self.trainer.strategy.data_parallel_rank))


def indices(replica: int) -> list[list[int]]:
    start, found = 24 * replica, []
    for size in SIZES[replica]:
        found.append(list(range(start, start + size)))
        start += size
    return found


def replicas(process: int) -> dict[str, Any]:
    from lightning_pipe import PipeStrategy

    two = {"data_parallel_size": 2, "micro_batches": 2}
    runner = trainer(PipeStrategy(**two), 4, use_distributed_sampler=False, limit_val_batches=0)
    uneven = AllSGD().double()
    runner.fit(uneven, datamodule=Uneven())
    two["compare_losses"] = False  # as has been done in the run before
    options = {"use_distributed_sampler": False, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    runner, twice = trainer(PipeStrategy(**two), 4, **options), AllSGD().double()
    runner.fit(twice, datamodule=Ordered())
    runner = trainer(PipeStrategy(**two), 4)
    logged = Replicated().double()
    runner.fit(logged, datamodule=Data())
    sampler = runner.train_dataloader.sampler
    strategy = runner.strategy
    return {
        "weights": oracle.state_of(uneven),
        "same": oracle.Trace(weights=oracle.state_of(twice)),
        "metrics": oracle.numbers(runner.callback_metrics),
        "sampler": (type(sampler), sampler.num_replicas, sampler.rank),
        "sizes": (strategy.pipeline_parallel_size, strategy.data_parallel_size, strategy.data_parallel_rank),
    }


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_trainers(replicas, 4, timeout=60)


@pytest.mark.feature(
    "Data loaders", "a batch_sampler of one's own", "works", "replicas may have batches of different sizes"
)
def test_replicas_with_unequal_batches_are_weighted_by_samples(four: list[dict[str, Any]]) -> None:
    trainer("auto")
    plain = AllSGD().double()
    optimizer = plain.configure_optimizers()
    x, y = dataset(40).tensors
    for rows in zip(indices(0), indices(1), strict=True):
        together = rows[0] + rows[1]
        optimizer.zero_grad()
        F.cross_entropy(plain(x[together]), y[together]).backward()
        optimizer.step()
    expected = {name: value for name, value in oracle.state_of(plain).items() if name != "steps"}
    for found in four:
        oracle.assert_equal(
            oracle.Trace(weights={n: found["weights"][n] for n in expected}), oracle.Trace(weights=expected)
        )


def test_accumulated_gradients_are_reduced_once(four: list[dict[str, Any]]) -> None:
    """Two replicas that see the same batches do what one does."""
    runner = trainer("auto", accumulate_grad_batches=2)
    plain = AllSGD().double()
    runner.fit(plain, datamodule=Ordered())
    for found in four:
        found["same"].weights["steps"] = plain.steps
        oracle.assert_equal(found["same"], oracle.Trace(weights=oracle.state_of(plain)))


@pytest.mark.feature("Trainer arguments", "use_distributed_sampler", "works", "divides over replicas alone")
@pytest.mark.feature(
    "Data loaders", "DistributedSampler", "works", "over replicas; the ranks of a pipeline see the same batch"
)
def test_samples_are_divided_over_replicas_not_over_ranks(four: list[dict[str, Any]]) -> None:
    assert [found["sampler"] for found in four] == [(DistributedSampler, 2, process // 2) for process in range(4)]
    assert [found["sizes"] for found in four] == [(2, 2, process // 2) for process in range(4)]


@pytest.mark.feature("Hooks", "self.log(sync_dist=True), self.all_gather", "works", "over replicas")
def test_logged_values_are_reduced_over_replicas(four: list[dict[str, Any]]) -> None:
    for found in four:
        metrics = found["metrics"]
        assert metrics["rows"] == 28
        assert metrics["gathered"] == pytest.approx(metrics["mean_step"])
        assert (metrics["told"], metrics["agreed"]) == (1, 1)
        for name in ("mean", "rows", "accuracy", "computed", "val_accuracy"):
            assert metrics[name] == pytest.approx(four[0]["metrics"][name])
