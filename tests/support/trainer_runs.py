"""What the processes of a test world run, and the same on one plain device: named cases with what users do."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import MixedPrecision

from lightning_pipe.trainer import meeting
from lightning_pipe.transport import failures
from lightning_pipe.transport.failures import FailureBoard
from tests.support import oracle
from tests.support.lit_modules import Data, Lit
from tests.support.user_modules import (
    Augmented,
    AugmentedByWorkers,
    BuiltInConfigureModel,
    BuiltInSetup,
    ClippedInParts,
    Combined,
    Counts,
    Finetuned,
    HeadInSetup,
    Means,
    OneType,
    OwnSGD,
    SeveralHooks,
    Single,
    StopsItself,
    Streamed,
    Thawed,
    TwoTrainingSets,
    TwoValidationLoaders,
)

QUIET = {**oracle.SILENT, "log_every_n_steps": 1}

# A batch of eight, and a short one.
ROWS = 12


@dataclass
class Case:
    """One way to use a Trainer.

    Args:
        model: makes the LightningModule.
        data: makes the datamodule with so many rows to train on.
        strategy: arguments of the strategy; one micro-batch, so that everything equals one device, unless said.
        dtype: of the module.
        callbacks: make callbacks.
        plugins: make plugins.
        trainer: arguments of the Trainer.
        tolerance: the largest difference from one device.
        whole: makes the LightningModule of one device, if that is to add up in the order of the ranks.
    """

    model: Callable[[], L.LightningModule] = Lit
    data: Callable[[int], L.LightningDataModule] = Data
    strategy: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    callbacks: list[Callable[[], L.Callback]] = field(default_factory=list)
    plugins: list[Callable[[], Any]] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    whole: Callable[[], L.LightningModule] | None = None


@dataclass
class Outcome:
    """What a run leaves behind on one process.

    Args:
        trace: losses, weights and logged values.
        rows: the attribute that counts rows, of which no micro-batch and no rank may be counted twice.
        optimizer_steps: of the Trainer.
        error: the traceback of a run that failed.
    """

    trace: oracle.Trace = field(default_factory=oracle.Trace)
    rows: int = 0
    optimizer_steps: int = 0
    error: str = ""


def quiet() -> None:
    """Silence what Lightning prints about itself."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:  # a logger's level clears what all loggers remember
            handler.setLevel(logging.ERROR)


@contextmanager
def impatient() -> Iterator[None]:
    """Processes soon say for how long they wait, and look often at what others say."""
    with ExitStack() as patches:
        for module in (meeting, failures):
            patches.enter_context(mock.patch.object(module, "SETTLED", 0.5))
        often = partialmethod(FailureBoard.watch, interval=0.1)
        patches.enter_context(mock.patch.object(FailureBoard, "watch", often))
        yield


def fit(case: Case, devices: int | None, accelerator: str = "cpu") -> Outcome:
    """Run a case; ``devices=None``: on one plain device."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    make = case.model if devices else case.whole or case.model
    module = make().to(case.dtype)
    if case.strategy.get("schedule") == "chimera":
        module.counts = False  # type: ignore[assignment]
    recorder = oracle.Recorder()
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=devices or 1,
        strategy=PipeStrategy(**{"micro_batches": 1, **case.strategy}) if devices else "auto",
        callbacks=[recorder, *(make() for make in case.callbacks)],
        plugins=[make() for make in case.plugins] or None,
        **{"max_epochs": 2, "num_sanity_val_steps": 0, **QUIET, **case.trainer},
    )
    trainer.fit(module, datamodule=case.data(ROWS))
    recorder.trace.weights = oracle.state_of(module)
    recorder.trace.metrics = oracle.numbers(trainer.callback_metrics)
    return Outcome(recorder.trace, module.rows, trainer.global_step)


def fits(
    process: int, names: list[str], devices: int, accelerator: str = "cpu", backend: str | None = None
) -> dict[str, Outcome]:
    """Run some cases one after the other in the processes of one world; stops at the first that fails."""
    outcomes: dict[str, Outcome] = {}
    for name in names:
        try:
            case = CASES[name]
            if backend is not None:
                case = replace(case, strategy={**case.strategy, "process_group_backend": backend})
            outcomes[name] = fit(case, devices, accelerator)
        except BaseException:
            outcomes[name] = Outcome(error=traceback.format_exc())
            break
    return outcomes


# ------------------------------------------------------------------ cases

_CUT = {"trainer": {"gradient_clip_val": 0.3}, "model": Means}
_SINGLE: dict[str, Any] = {"dtype": torch.float32, "data": Single, "tolerance": 1e-5}

CASES: dict[str, Case] = {
    "plain": Case(trainer={"num_sanity_val_steps": 2}),  # as it is by default
    "accumulated": Case(trainer={"accumulate_grad_batches": 2}),
    "clipped": Case(trainer={"gradient_clip_val": 0.1}),
    "options": Case(
        trainer={
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
            "limit_train_batches": 2,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 1,
            "reload_dataloaders_every_n_epochs": 1,
            "val_check_interval": 1,
            "profiler": "simple",
            "detect_anomaly": True,
        }
    ),
    "micro_batches": Case(strategy={"micro_batches": 3}, **_CUT),
    "interleaved": Case(strategy={"schedule": "interleaved", "micro_batches": 4, "stages": 4}, **_CUT),
    "recomputed": Case(strategy={"recompute": "always", "micro_batches": 3}, **_CUT),
    "two_loss_ranks": Case(strategy={"schedule": "chimera", "micro_batches": 4}, **_CUT),
    "configure_model_augmented": Case(BuiltInConfigureModel, Augmented, trainer={"max_epochs": 1}),
    "setup": Case(BuiltInSetup),
    "head_in_setup": Case(HeadInSetup),
    "averaged": Case(callbacks=[lambda: callbacks.EMAWeightAveraging(decay=0.9)]),
    "stochastic_averaging_combined": Case(
        TwoTrainingSets,
        Combined,
        callbacks=[lambda: callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)],
        trainer={"max_epochs": 3},
    ),
    "augmented_by_workers_until_should_stop": Case(StopsItself, AugmentedByWorkers),
    "frozen": Case(OwnSGD),
    "finetuned_stream": Case(
        Thawed, Streamed, callbacks=[Finetuned], trainer={"max_epochs": 3, "gradient_clip_val": 0.1}
    ),
    "hooks": Case(SeveralHooks, TwoValidationLoaders, callbacks=[Counts]),
    "early_stopping": Case(
        callbacks=[lambda: callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)], trainer={"max_epochs": 4}
    ),
    "fast_dev_run": Case(trainer={"fast_dev_run": 2}),
    "bf16_mixed_overfit_batches": Case(
        trainer={"precision": "bf16-mixed", "overfit_batches": 2, "max_epochs": 1}, **_SINGLE
    ),
    "bf16_true": Case(trainer={"precision": "bf16-true", "max_epochs": 1}, **_SINGLE),
    "double": Case(OneType, trainer={"precision": "64-true"}, dtype=torch.float32),
    # In half precision a difference in the last bit of the norm may round a weight's half the other way: with these 28
    # rows losses differ by 1e-4 from one device that adds the squares of all gradients up at once.
    "scaled": Case(
        whole=ClippedInParts,
        data=lambda rows: Single(28),
        dtype=torch.float32,
        plugins=[lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3))],
        trainer={"gradient_clip_val": 0.5, "max_epochs": 1},
        tolerance=0.0,
    ),
}
