"""A Trainer with a schedule without a flush, and the papers' closed forms of what it is to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support import asynchronous_engine
from tests.support.asynchronous_engine import Batch, Net, Version, batches
from tests.support.processes import in_turn, run_trainers
from tests.support.trainer_runs import QUIET, quiet

EPOCH = 7
ROWS = (8, 8, 8, 8, 8, 8, 5)
BATCHES = [{name: value.double() for name, value in batch.items()} for batch in batches(EPOCH, rows=ROWS)]


def learning_rate(step: int) -> float:
    return 0.1 * 0.9**step


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=learning_rate(0), momentum=0.9)


class Feed:
    """Batches that can be gone on with in the middle of an epoch."""

    def __init__(self, data: Sequence[Batch]) -> None:
        self.data, self.next = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Batch]:
        # who knows the length does not ask for the end
        self.next %= len(self.data)
        while self.next < len(self.data):
            self.next += 1
            yield self.data[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Lit(L.LightningModule):
    """Keeps what its hooks see."""

    rate = staticmethod(learning_rate)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net().double()
        self.seen: list[str] = []
        self.outputs: list[float] = []
        self.extra: Any = None
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

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return momentum(parameters)

    def train_dataloader(self) -> Any:
        return DataLoader(BATCHES, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES[:1], batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rate(step) / self.rate(0))
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
    extra: Any = None
    error: str = ""


def fit(
    process: int,
    strategy: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    devices: int = 2,
    saves: tuple[str, Sequence[int]] | None = None,
    resume: str | None = None,
    stop_at: int | None = None,
    plugins: bool = False,
    module: Callable[[], Lit] = Lit,
    callbacks: Sequence[L.Callback] = (),
) -> Outcome:
    from lightning.pytorch.plugins import MixedPrecision

    from lightning_pipe import PipeStrategy

    quiet()
    lit, logger = module(), Kept()
    lit.stop_at = stop_at
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        **QUIET,
        "logger": logger,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        **(trainer or {}),
    }
    trainer_ = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PipeStrategy(**strategy),
        callbacks=[*callbacks, *([Saves(*saves)] if saves else [])],
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if plugins else None,
        **arguments,
    )
    try:
        trainer_.fit(lit, ckpt_path=resume, weights_only=False)
    except RuntimeError as error:
        return Outcome(error=str(error))
    except SIGTERMException:
        return Outcome(error="SIGTERMException", extra=trainer_.fit_loop.epoch_loop.total_batch_idx + 1)
    names = ("train_loss_step", "train_loss_epoch", "val_loss")
    return Outcome(
        trainer_.global_step,
        {name: logger.of(name) for name in names},
        [step for step, row in logger.rows if "train_loss_step" in row],
        {name: value.clone() for name, value in lit.net.state_dict().items()},
        lit.seen,
        lit.outputs,
        lit.extra,
    )


def closed_form(
    order: Sequence[int],
    stages: int,
    version: Version,
    drains: Sequence[int],
    micro_batches: int = 1,
    together: Sequence[int] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
    rate: Callable[[int], float] = learning_rate,
    data: Sequence[Batch] = BATCHES,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses of the batches in this order, evaluations after each drain, and weights at the end."""
    torch.manual_seed(0)
    options = {"micro_batches": micro_batches, "drains": [*drains, len(order)], "together": together, "rate": rate}
    batches = [data[index] for index in order]
    found = asynchronous_engine.closed_form(
        Net().double(), batches, stages, version, optimizer, evaluated=data[0], **options
    )
    return found.losses, found.evaluated, found.values


def run(strategy: dict[str, Any], trainer: dict[str, Any], devices: int = 2, **options: Any) -> list[Outcome]:
    return run_trainers(fit, devices, strategy=strategy, trainer=trainer, devices=devices, **options)


def run_all(runs: Mapping[str, dict[str, Any]]) -> dict[str, list[Outcome]]:
    """The outcomes of several runs of the same two processes; each has arguments of `fit`."""
    return in_turn({name: partial(fit, **options) for name, options in runs.items()}, 2)


def assert_close(found: Sequence[float], expected: Sequence[float]) -> None:
    # what is logged is float32
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def assert_weights(outcomes: Sequence[Outcome], expected: dict[str, Tensor]) -> None:
    for outcome in outcomes:
        assert not outcome.error
        for name, value in expected.items():
            torch.testing.assert_close(outcome.values[name], value, rtol=1e-12, atol=1e-12)
