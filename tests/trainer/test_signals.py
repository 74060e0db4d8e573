"""Signals to a run: all processes act between the same two batches, and nobody waits for one that has left."""

from __future__ import annotations

import os
import signal
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.trainer import signals
from lightning_pipe.transport.failures import FailureBoard
from tests.support.evaluated_modules import Evaluated, Rows
from tests.support.lit_modules import Data, Lit
from tests.support.pairs import pairs
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

AT = 3
"""The batch, counted over epochs, in which the signal comes."""


class Signalled(L.Callback):
    """One process gets a signal while it computes."""

    def __init__(self, process: int, number: int) -> None:
        self.process, self.number = process, number
        self.batches = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.process and self.batches == AT:
            os.kill(os.getpid(), self.number)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


def trainer_with(callback: L.Callback, folder: Path | None = None) -> L.Trainer:
    quiet()
    torch.manual_seed(0)
    strategy = PipeStrategy(micro_batches=2, layers="model")
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        callbacks=[callback],
        default_root_dir=folder,
        **QUIET,
    )


def terminated(process: int, signalled: int) -> int:
    signals._ALONE = 0.0 if signalled else 3.0
    callback = Signalled(signalled, signal.SIGTERM)
    with pytest.raises(SIGTERMException) as ended:
        trainer_with(callback).fit(Lit().double(), datamodule=Data())
    assert ended.value.code == 143  # as the shell says of a process that SIGTERM has ended
    return callback.batches


@pytest.mark.feature("Hooks", "SIGTERM", "works", "all processes end after the same batch")
@pytest.mark.timeout(60)
def test_all_leave_after_the_batch_in_which_process_0_was_asked() -> None:
    # behind the report about its batch: it goes along with the next one
    assert run_trainers(terminated, 2, timeout=50, signalled=0) == [AT + 2] * 2


@pytest.mark.timeout(60)
def test_a_process_that_is_asked_alone_ends_all() -> None:
    first, alone = run_trainers(terminated, 2, timeout=50, signalled=1)
    assert AT + 1 <= alone <= first + 1 <= AT + 4


def saved_when_terminated(process: int, folder: Path) -> int:
    trainer = trainer_with(Signalled(0, signal.SIGTERM))
    trainer.callbacks.append(OnExceptionCheckpoint(folder))
    with pytest.raises(SIGTERMException):
        trainer.fit(Lit().double(), datamodule=Data())
    return trainer.global_step


class SavesSlowly(L.Callback):
    """Process 0 is busy for longer than one that does not react may be."""

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(4 if trainer.global_rank == 0 else 0)


def saved_slowly(process: int) -> int:
    FailureBoard.watch = partialmethod(FailureBoard.watch, exit_after=0.5)  # type: ignore[assignment]
    trainer = trainer_with(Signalled(0, signal.SIGTERM))
    trainer.callbacks.append(SavesSlowly())
    with pytest.raises(SIGTERMException):
        trainer.fit(Lit().double(), datamodule=Data())
    return trainer.global_step


@pytest.mark.timeout(60)
def test_a_process_that_saves_when_all_end_is_given_time() -> None:
    assert len({*run_trainers(saved_slowly, 2, timeout=50)}) == 1


@pytest.mark.timeout(60)
def test_a_checkpoint_for_exceptions_is_written_when_all_end_together(tmp_path: Path) -> None:
    steps = run_trainers(saved_when_terminated, 2, timeout=50, folder=tmp_path)
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert [checkpoint["global_step"]] * 2 == steps
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())
    assert set(checkpoint["state_dict"]) == set(Lit().state_dict())


class Late(L.Callback):
    """One process gets a signal where nobody asks for it any more."""

    def __init__(self, process: int, place: str) -> None:
        setattr(self, place, self.act)
        self.process = process

    def act(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == self.process:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated_late(process: int, signalled: int, place: str) -> object:
    with pytest.raises(SIGTERMException):
        trainer_with(Late(signalled, place)).fit(Lit().double(), datamodule=Data())
    return signal.getsignal(signal.SIGTERM)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("signalled", "place"),
    [pytest.param(0, "on_train_end", marks=pytest.mark.slow), (1, "on_train_end")],
)
def test_one_that_comes_after_the_batches_ends_the_run(signalled: int, place: str) -> None:
    # nobody asks the other one: it hears of the signal when a message fails
    outcomes = run_trainers(terminated_late, 2, timeout=50, signalled=signalled, place=place)
    assert outcomes == [signal.SIG_DFL] * 2


class TerminatedInEvaluation(Evaluated):
    """One process gets a signal in an evaluation step."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self.process = process

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if batch_idx == AT and self.trainer.global_rank == self.process:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().predict_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.predict_step(batch, batch_idx)
        return super().validation_step(batch, batch_idx)


def terminated_in_evaluation(process: int, signalled: int, name: str, stream: bool, size: int) -> int:
    quiet()
    strategy = PipeStrategy(layers="model", stream_evaluation=stream)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET)
    loop: Any = getattr(trainer, f"{name}_loop")
    data = DataLoader(Rows(4 * size), batch_size=4)
    with pytest.raises(SIGTERMException) as ended:
        getattr(trainer, name)(TerminatedInEvaluation(signalled).double(), data)
    assert ended.value.code == 143
    return int(loop.batch_progress.current.completed)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "signalled", "stream"),
    pairs(
        [("predict", 0), ("predict", 1), ("validate", 1), ("validate", 0)],
        [True, False],
        lambda signalled, stream: signalled == 2 * stream,
    ),
)
def test_one_that_comes_in_an_evaluation_ends_it_before_the_next_batch(name: str, signalled: int, stream: bool) -> None:
    batches = run_trainers(
        terminated_in_evaluation, 2, timeout=50, signalled=signalled, name=name, stream=stream, size=50
    )
    # in a stream the first stage may run the step two batches ahead of its loop
    assert AT - (2 if stream and signalled else 0) <= batches[signalled] <= AT
    assert batches[1 - signalled] <= AT + 3


@pytest.mark.timeout(60)
def test_one_that_comes_in_the_last_batch_of_a_prediction_ends_all() -> None:
    batches = run_trainers(
        terminated_in_evaluation, 2, timeout=50, signalled=0, name="predict", stream=True, size=AT + 1
    )
    assert max(batches) <= AT + 1


class InValidation(Lit):
    """One process gets a signal in the validation behind the first epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking and self.trainer.current_epoch == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().validation_step(batch, batch_idx)


def requeued(process: int, folder: Path, validating: bool) -> tuple[int, int, bool]:
    os.environ["SLURM_JOB_ID"] = "7"
    commands = []
    signal_connector.call = lambda command, **_: commands.append(command) or 0  # type: ignore[attr-defined]
    callback = Signalled(-1 if validating else 0, signal.SIGUSR1)
    trainer = trainer_with(callback, folder)

    class Handles(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            # as Lightning registers it under SLURM
            handler = trainer._signal_connector._slurm_sigusr_handler_fn
            signal.signal(signal.SIGUSR1, handler)  # type: ignore[arg-type]

    trainer.callbacks.append(Handles())
    trainer.fit((InValidation if validating else Lit)().double(), datamodule=Data())
    saved = torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=False)
    return callback.batches, saved["global_step"], commands == [["scontrol", "requeue", "7"]]


@pytest.mark.feature("Plugins", "SLURMEnvironment that requeues", "works", "all processes save after the same batch")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("validating", [False, True])
def test_a_job_to_be_requeued_is_saved_by_all_after_the_batch(tmp_path: Path, validating: bool) -> None:
    first, second = run_trainers(requeued, 2, timeout=50, folder=tmp_path, validating=validating)
    batches = first[0]
    saved = batches // 3 + 1 if validating else AT + 2
    assert first == (batches, saved, True)  # and goes on: SLURM ends it
    assert second == (batches, saved, False)
    assert batches > saved
