"""A Trainer with a schedule without a flush: losses, logs, steps and checkpoints against the papers' closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe.schedules import PipeDream
from tests.launch import run_trainers
from tests.pipeline.flow import Batch, ClosedForm, Net, Version, batches, pipedream, two_versions
from tests.strategy.worlds import quiet

EPOCH = 7
ROWS = (8, 8, 8, 8, 8, 8, 5)
BATCHES = [{name: value.double() for name, value in batch.items()} for batch in batches(EPOCH, rows=ROWS)]


def learning_rate(step: int) -> float:
    return 0.1 * 0.9**step


class Lit(L.LightningModule):
    """Keeps what its hooks see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net().double()
        self.seen: list[str] = []
        self.outputs: list[float] = []
        self.stop_at: int | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.net(**batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if batch_idx == self.stop_at:
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append("step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append("zero")

    def on_after_backward(self) -> None:
        self.seen.append("backward")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES[:1], batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=learning_rate(0), momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Saves(L.Callback):
    """Saves after some batches."""

    def __init__(self, folder: str, at: Sequence[int]) -> None:
        self.folder, self.at = folder, at

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        total = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if total in self.at:
            trainer.save_checkpoint(f"{self.folder}/{total}.ckpt")


class Kept(DummyLogger):
    """Keeps every value with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))

    def of(self, name: str) -> list[float]:
        return [row[name] for _, row in self.rows if name in row]


@dataclass
class Outcome:
    steps: int = 0
    logged: dict[str, list[float]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    error: str = ""


def fit(
    process: int,
    strategy: dict[str, Any],
    trainer: dict[str, Any],
    devices: int = 2,
    saves: tuple[str, Sequence[int]] | None = None,
    resume: str | None = None,
    stop_at: int | None = None,
    plugins: bool = False,
) -> Outcome:
    from lightning.pytorch.plugins import MixedPrecision

    from lightning_pipe import PipeStrategy

    quiet()
    module, logger = Lit(), Kept()
    module.stop_at = stop_at
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        **trainer,
    }
    trainer_ = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PipeStrategy(**strategy),
        logger=logger,
        callbacks=[Saves(*saves)] if saves else None,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if plugins else None,
        **arguments,
    )
    try:
        trainer_.fit(module, ckpt_path=resume, weights_only=False)
    except RuntimeError as error:
        return Outcome(error=str(error))
    names = ("train_loss_step", "train_loss_epoch", "val_loss")
    return Outcome(
        trainer_.global_step,
        {name: logger.of(name) for name in names},
        [step for step, row in logger.rows if "train_loss_step" in row],
        {name: value.clone() for name, value in module.net.state_dict().items()},
        module.seen,
        module.outputs,
    )


def closed_form(
    order: Sequence[int],
    stages: int,
    version: Version,
    drains: Sequence[int],
    micro_batches: int = 1,
    together: Sequence[int] | None = None,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses of the batches in this order, evaluations after each drain, and weights at the end."""
    torch.manual_seed(0)
    truth = ClosedForm(Net().double(), stages, version, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), together)
    losses, evaluated = [], []
    for number, index in enumerate(order, 1):
        for optimizer in truth.optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(number - 1)
        drained = number in drains or number == len(order)
        losses.append(truth.train(BATCHES[index], micro_batches, last=drained))
        if drained:
            truth.begin()
            with torch.no_grad():
                evaluated.append(float(truth.model(**BATCHES[0])))
    return losses, evaluated, truth.values()


def run(strategy: dict[str, Any], trainer: dict[str, Any], devices: int = 2, **options: Any) -> list[Outcome]:
    return run_trainers(fit, devices, strategy=strategy, trainer=trainer, devices=devices, **options)


def assert_close(found: Sequence[float], expected: Sequence[float]) -> None:
    # what is logged is float32
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def assert_weights(outcomes: Sequence[Outcome], expected: dict[str, Tensor]) -> None:
    for outcome in outcomes:
        assert not outcome.error
        for name, value in expected.items():
            torch.testing.assert_close(outcome.values[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "devices"),
    [("pipedream", "auto", 2), ("pipedream_2bw", 4, 2), ("pipedream", "auto", 3)],
)
def test_two_epochs_with_validation_in_between(schedule: str, micro_batches: Any, devices: int) -> None:
    balance = [6 // devices] * devices
    strategy = {"schedule": schedule, "micro_batches": micro_batches, "layers": "net.layers", "balance": balance}
    outcomes = run(strategy, {"max_epochs": 2, "val_check_interval": 3}, devices)
    size = 1 if micro_batches == "auto" else micro_batches
    version = pipedream(devices) if size == 1 else two_versions
    drains = [3, 6, 7, 10, 13, 14]
    losses, evaluated, values = closed_form([*range(EPOCH)] * 2, devices, version, drains, size)
    assert_weights(outcomes, values)
    for outcome in outcomes:
        assert outcome.steps == len(losses)
        # one of each for every step; gradients are zeroed, and passed on, in calls without a step, too
        assert outcome.seen.count("step") == len(losses)
        lag = devices - 1 if size == 1 else 1
        assert outcome.seen.count("zero") == outcome.seen.count("backward") == len(losses) + lag * len(drains)
        # every loss once, each at a number of its own
        assert_close(outcome.logged["train_loss_step"], losses)
        assert outcome.numbers == sorted(set(outcome.numbers))
        epochs = [losses[:EPOCH], losses[EPOCH:]]
        means = [sum(loss * rows for loss, rows in zip(epoch, ROWS, strict=True)) / sum(ROWS) for epoch in epochs]
        assert_close(outcome.logged["train_loss_epoch"], means)
        assert_close(outcome.logged["val_loss"], [evaluated[i] for i in (0, 1, 3, 4)])
        arrived = torch.tensor(outcome.outputs)
        assert len(arrived) == len(losses)
        assert int(arrived.isnan().sum()) == sum(min(lag, b - a) for a, b in zip([0, *drains], drains, strict=False))


def test_checkpoints_and_resuming_between_batches(tmp_path: Path) -> None:
    strategy = {"schedule": "pipedream", "layers": "net.layers"}
    order = [*range(EPOCH)] * 2
    outcomes = run(strategy, {"max_epochs": 2}, saves=(str(tmp_path), [4, 10]))
    losses, _, values = closed_form(order, 2, pipedream(2), [4, 7, 10])
    assert_weights(outcomes, values)
    assert_close(outcomes[0].logged["train_loss_step"], losses)
    checkpoint = torch.load(tmp_path / "4.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 4
    _, _, after_four = closed_form(order[:4], 2, pipedream(2), [])
    for name, value in after_four.items():
        torch.testing.assert_close(checkpoint["state_dict"][f"net.{name}"], value, rtol=1e-12, atol=1e-12)
    # a plain loader begins anew when it goes on in the middle of an epoch
    resumed = run(strategy, {"max_epochs": 2}, resume=str(tmp_path / "10.ckpt"))
    order = [*range(EPOCH), 0, 1, 2, 0, 1, 2, 3]
    losses, _, values = closed_form(order, 2, pipedream(2), [4, 7, 10])
    assert_weights(resumed, values)
    assert resumed[0].steps == len(order)
    assert_close(resumed[0].logged["train_loss_step"], losses[10:])


def test_the_end_comes_after_what_is_in_flight() -> None:
    strategy = {"schedule": "pipedream", "layers": "net.layers"}
    # exactly as many steps as asked for
    outcomes = run(strategy, {"max_steps": 5, "max_epochs": -1})
    losses, _, values = closed_form(range(5), 2, pipedream(2), [])
    assert_weights(outcomes, values)
    assert [outcome.steps for outcome in outcomes] == [5, 5]
    # the step of batch 2 asks to stop, when batch 3 has begun
    outcomes = run(strategy, {"max_epochs": 3}, stop_at=2)
    losses, _, values = closed_form(range(4), 2, pipedream(2), [])
    assert_weights(outcomes, values)
    assert_close(outcomes[1].logged["train_loss_step"], losses)


def test_replicas_of_stages_step_after_several_batches() -> None:
    strategy = {"schedule": PipeDream(replicas=(2, 1)), "layers": "net.layers", "balance": [3, 3]}
    outcomes = run(strategy, {"max_epochs": 2}, devices=3)
    order, drains = [*range(EPOCH)] * 2, [EPOCH, 2 * EPOCH]
    losses, _, values = closed_form(order, 2, lambda s, t: max(0, (t // 2 - 1, t)[s]), drains, together=[2, 1])
    assert_weights(outcomes, values)
    # steps are counted alike on all ranks, whoever takes them: by batches
    assert [outcome.steps for outcome in outcomes] == [len(order)] * 3
    assert [outcome.seen.count("step") for outcome in outcomes] == [len(order), 8, 8]
    assert_close(outcomes[1].logged["train_loss_step"], losses)


def test_one_device() -> None:
    for schedule, version, size in (("pipedream", pipedream(1), 1), ("pipedream_2bw", two_versions, 4)):
        strategy = {"schedule": schedule, "layers": "net.layers", "micro_batches": size, "stages": 3}
        outcomes = run(strategy, {"max_epochs": 2, "val_check_interval": 3}, devices=1)
        losses, _, values = closed_form([*range(EPOCH)] * 2, 1, version, [], size)
        assert_weights(outcomes, values)
        assert_close(outcomes[0].logged["train_loss_step"], losses)


def test_replicas_of_pipelines() -> None:
    strategy = {"schedule": "pipedream", "layers": "net.layers", "data_parallel_size": 2}
    outcomes = run(strategy, {}, devices=4)
    # both replicas have the same batches here, so that their mean is that of one
    _, _, values = closed_form(range(EPOCH), 2, pipedream(2), [])
    assert_weights(outcomes, values)


@pytest.mark.parametrize(
    ("strategy", "trainer", "plugins", "message"),
    [
        ({}, {"gradient_clip_val": 1.0}, False, "gradient_clip_val=1.0 limits the norm"),
        ({}, {"accumulate_grad_batches": 2}, False, "accumulate_grad_batches=2"),
        ({}, {}, True, "16-mixed precision scales the loss"),
        ({"micro_batches": 2}, {}, False, "makes a step of 1 micro-batches"),
        ({"shard_optimizer": True}, {}, False, "shard_optimizer=True does not go"),
    ],
    ids=["norm", "accumulation", "16-mixed", "micro_batches", "sharded"],
)
def test_refusals(strategy: dict[str, Any], trainer: dict[str, Any], plugins: bool, message: str) -> None:
    for outcome in run({"schedule": "pipedream", "layers": "net.layers", **strategy}, trainer, plugins=plugins):
        assert message in outcome.error
