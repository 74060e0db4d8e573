"""Replicas, evaluation and the decisions that all stages take together."""

from __future__ import annotations

import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipe.trainer.world import World
from tests.support import oracle
from tests.support.lit_modules import Data, Lit, dataset
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet
from tests.support.user_modules import OwnSGD, Single

SIZES = ([8, 8, 8], [8, 4, 4])
"""Samples of the batches of two replicas."""


def trainer(strategy: Any, devices: int = 1, **options: Any) -> L.Trainer:
    quiet()
    L.seed_everything(7, verbose=False)
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{"max_epochs": 1, **QUIET, **options})


def test_a_copy_of_the_process_closes_nothing() -> None:
    closed: list[int] = []
    transport: Any = SimpleNamespace(close=lambda: closed.append(1))
    sizes: Any = None
    world = World(sizes, transport)
    if (copy := os.fork()) == 0:
        with suppress(Exception):
            world.end()
        os._exit(len(closed))
    assert os.waitpid(copy, 0)[1] == 0
    world.end()
    assert closed == [1]


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
        return loss


class Ordered(Data):
    """Batches in a fixed order, the same for all replicas."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(dataset(44), batch_size=8)


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


class InSixteenBits(L.Callback):
    """For every gradient whether it has the digits of bfloat16 alone."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        held = [value for name, value in pl_module.named_parameters() if trainer.strategy.pipeline.holds(name)]
        self.found += [torch.equal(value.grad, value.grad.bfloat16().double()) for value in held]


def replicas(process: int) -> dict[str, Any]:
    from lightning_pipe import PipeStrategy

    two = {"data_parallel_size": 2, "micro_batches": 2}
    exact, rounded = InSixteenBits(), InSixteenBits()
    runner = trainer(PipeStrategy(**two), 4, use_distributed_sampler=False, limit_val_batches=0, callbacks=[exact])
    uneven = AllSGD().double()
    runner.fit(uneven, datamodule=Uneven())
    strategy = PipeStrategy(**two, reduce_dtype="bfloat16")
    runner = trainer(strategy, 4, limit_val_batches=0, limit_train_batches=1, callbacks=[rounded])
    runner.fit(AllSGD().double(), datamodule=Data())
    same: dict[int, oracle.Trace] = {}
    for schedule, accumulate in (("1f1b", 2), ("chimera", 3)):
        runner = trainer(
            PipeStrategy(schedule, **two), 4, use_distributed_sampler=False, accumulate_grad_batches=accumulate
        )
        twice = AllSGD().double()
        twice.counts = schedule == "1f1b"
        runner.fit(twice, datamodule=Ordered())
        same[accumulate] = oracle.Trace(weights=oracle.state_of(twice))
    runner = trainer(PipeStrategy(**two), 4)
    logged = Replicated().double()
    runner.fit(logged, datamodule=Data())
    sampler = runner.train_dataloader.sampler
    strategy = runner.strategy
    return {
        "weights": oracle.state_of(uneven),
        "same": same,
        "rounded": (rounded.found, exact.found),
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


def test_sums_in_bfloat16_reach_the_optimizer(four: list[dict[str, Any]]) -> None:
    for rounded, exact in (found["rounded"] for found in four):
        assert rounded
        assert all(rounded)
        assert not any(exact)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_are_reduced_once(accumulate: int, four: list[dict[str, Any]]) -> None:
    """Two replicas that see the same batches do what one does."""
    runner = trainer("auto", accumulate_grad_batches=accumulate)
    plain = AllSGD().double()
    runner.fit(plain, datamodule=Ordered())
    for found in four:
        found["same"][accumulate].weights["steps"] = plain.steps
        oracle.assert_equal(found["same"][accumulate], oracle.Trace(weights=oracle.state_of(plain)))


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
        assert metrics["rows"] == 44
        assert metrics["gathered"] == pytest.approx(metrics["mean_step"])
        for name in ("mean", "rows", "accuracy", "val_accuracy"):
            assert metrics[name] == pytest.approx(four[0]["metrics"][name])


# ------------------------------------------------------------------ evaluation


class Writer(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Tensor, indices: Any, *others: Any) -> None:
        self.batches.append((indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = (indices, [prediction.tolist() for prediction in predictions])


def evaluated(process: int, devices: int | None) -> dict[str, Any]:
    from lightning_pipe import PipeStrategy

    writer = Writer()
    strategy = PipeStrategy(micro_batches=1) if devices else "auto"
    # a metric that was reset in inference mode cannot be updated in training (torchmetrics 1.4)
    runner = trainer(strategy, devices or 1, callbacks=[writer], inference_mode=False)
    module, data = Lit().double(), Data()
    found: dict[str, Any] = {"before": runner.validate(module, datamodule=data, verbose=False)}
    runner.fit(module, datamodule=data)
    found["after"] = runner.validate(module, datamodule=data, verbose=False)
    found["test"] = runner.test(module, datamodule=data, verbose=False)
    found["predictions"] = torch.cat(runner.predict(module, datamodule=data)).tolist()
    found["written"] = (writer.batches, writer.epoch)
    found["called"] = module(torch.ones(2, 12, dtype=torch.float64)).tolist()
    return found


@pytest.mark.feature("Callbacks", "BasePredictionWriter", "works")
@pytest.mark.feature("Hooks", "validate, test and predict before and after fit", "works")
def test_validate_fit_test_predict_in_turn() -> None:
    plain = evaluated(0, None)
    for found in run_trainers(evaluated, 2, timeout=60, devices=2):
        for name in ("before", "after", "test"):
            assert found[name][0] == pytest.approx(plain[name][0])
        assert found["predictions"] == plain["predictions"]
        assert found["written"] == plain["written"]
        torch.testing.assert_close(found["called"], plain["called"])


# ------------------------------------------------------------------ decisions together


class Overflows(OwnSGD):
    """Has an infinite gradient once, on the first stage alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_after_backward(self) -> None:
        gradient = self.model[0].weight.grad
        if self.trainer.fit_loop.total_batch_idx == 1 and gradient is not None:
            gradient.fill_(float("inf"))


def overflowing(process: int, devices: int | None) -> tuple[float, oracle.Trace]:
    from lightning_pipe import PipeStrategy

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10))
    strategy = PipeStrategy(micro_batches=1) if devices else "auto"
    runner = trainer(strategy, devices or 1, plugins=[plugin], gradient_clip_val=0.5)
    module = Overflows()
    runner.fit(module, datamodule=Single())
    assert plugin.scaler is not None
    return plugin.scaler.get_scale(), oracle.Trace(weights=oracle.state_of(module))


def test_an_overflow_on_one_stage_is_one_on_all() -> None:
    scale, plain = overflowing(0, None)
    assert scale == 2.0**9
    for found_scale, found in run_trainers(overflowing, 2, timeout=60, devices=2):
        assert found_scale == scale
        oracle.assert_equal(found, plain, tolerance=1e-5)
