"""Signals to a run: all processes act between the same two batches, and nobody waits for one that has left."""

from __future__ import annotations

import os
import signal
import time
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

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
from tests.support.pairs import asked, slow_but
from tests.support.processes import in_turn
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


def trainer_with(callback: L.Callback, folder: Path | None = None, **options: Any) -> L.Trainer:
    quiet()
    torch.manual_seed(0)
    strategy = PipeStrategy(micro_batches=2, layers="model", compare_losses=False)
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        callbacks=[callback],
        default_root_dir=folder,
        **{**QUIET, "limit_val_batches": 0, **options},
    )


CALLS: dict[Any, Any] = {}
"""What the tests look at: runs of the same two processes."""
Found = dict[Any, list[Any]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("signals")
    given = [*asked(request, "name", "signalled", "stream"), *asked(request, "run")]
    return in_turn({name: partial(CALLS[name], folder / str(name)) for name in CALLS if name in given}, 2)


def terminated(folder: Path, process: int, signalled: int) -> int:
    callback = Signalled(signalled, signal.SIGTERM)
    alone = mock.patch.object(signals, "_ALONE", 0.0 if signalled else 3.0)
    with alone, pytest.raises(SIGTERMException) as ended:
        trainer_with(callback).fit(Lit().double(), datamodule=Data())
    assert ended.value.code == 143  # as the shell says of a process that SIGTERM has ended
    return callback.batches


CALLS["asked"] = partial(terminated, signalled=0)
CALLS["asked alone"] = partial(terminated, signalled=1)


@pytest.mark.feature("Hooks", "SIGTERM", "works", "all processes end after the same batch")
@pytest.mark.parametrize("run", ["asked"])
def test_all_leave_after_the_batch_in_which_process_0_was_asked(run: str, found: Found) -> None:
    # behind the report about its batch: it goes along with the next one
    assert found[run] == [AT + 2] * 2


@pytest.mark.parametrize("run", ["asked alone"])
def test_a_process_that_is_asked_alone_ends_all(run: str, found: Found) -> None:
    first, alone = found[run]
    assert AT + 1 <= alone <= first + 1 <= AT + 4


def saved_when_terminated(folder: Path, process: int) -> tuple[int, Path]:
    trainer = trainer_with(Signalled(0, signal.SIGTERM))
    trainer.callbacks.append(OnExceptionCheckpoint(folder))
    with pytest.raises(SIGTERMException):
        trainer.fit(Lit().double(), datamodule=Data())
    return trainer.global_step, folder / "on_exception.ckpt"


class SavesSlowly(L.Callback):
    """Process 0 is busy for longer than one that does not react may be."""

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(2 if trainer.global_rank == 0 else 0)


def saved_slowly(folder: Path, process: int) -> int:
    trainer = trainer_with(Signalled(0, signal.SIGTERM))
    trainer.callbacks.append(SavesSlowly())
    soon = partialmethod(FailureBoard.__init__, patience=0.5), partialmethod(FailureBoard.watch, exit_after=0.5)
    impatient = mock.patch.multiple(FailureBoard, __init__=soon[0], watch=soon[1])
    with impatient, pytest.raises(SIGTERMException):
        trainer.fit(Lit().double(), datamodule=Data())
    return trainer.global_step


CALLS["saved"] = saved_when_terminated
CALLS["saved slowly"] = saved_slowly


@pytest.mark.slow
@pytest.mark.parametrize("run", ["saved slowly"])
def test_a_process_that_saves_when_all_end_is_given_time(run: str, found: Found) -> None:
    assert len({*found[run]}) == 1


@pytest.mark.parametrize("run", ["saved"])
def test_a_checkpoint_for_exceptions_is_written_when_all_end_together(run: str, found: Found) -> None:
    (step, path), (other, _) = found[run]
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["global_step"] == step == other
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())
    assert set(checkpoint["state_dict"]) == set(Lit().state_dict())


class Late(L.Callback):
    """One process gets a signal where nobody asks for it any more."""

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated_late(folder: Path, process: int) -> object:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        trainer_with(Late()).fit(Lit().double(), datamodule=Data())
    return signal.getsignal(signal.SIGTERM) == before == signal.SIG_DFL


CALLS["late"] = terminated_late


@pytest.mark.parametrize("run", ["late"])
def test_one_that_comes_after_the_batches_ends_the_run(run: str, found: Found) -> None:
    """Nobody asks the other one: it hears of the signal when a message fails."""
    assert found[run] == [True, True]


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


def terminated_in_evaluation(folder: Path, process: int, signalled: int, name: str, stream: bool) -> int:
    quiet()
    strategy = PipeStrategy(layers="model", stream_evaluation=stream)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET)
    loop: Any = getattr(trainer, f"{name}_loop")
    data = DataLoader(Rows(200), batch_size=4)
    with pytest.raises(SIGTERMException) as ended:
        getattr(trainer, name)(TerminatedInEvaluation(signalled).double(), data)
    assert ended.value.code == 143
    return int(loop.batch_progress.current.completed)


EVALUATIONS = [("predict", 0, True), ("validate", 1, False)]
for name, signalled, stream in EVALUATIONS:
    options = {"name": name, "signalled": signalled, "stream": stream}
    CALLS[name, signalled, stream] = partial(terminated_in_evaluation, **options)


@pytest.mark.parametrize(("name", "signalled", "stream"), slow_but(EVALUATIONS, ("predict", 0, True)))
def test_one_that_comes_in_an_evaluation_ends_it_before_the_next_batch(
    name: str, signalled: int, stream: bool, found: Found
) -> None:
    batches = found[name, signalled, stream]
    # in a stream the first stage may run the step two batches ahead of its loop
    assert AT - (2 if stream and signalled else 0) <= batches[signalled] <= AT
    assert batches[1 - signalled] <= AT + 3


class InValidation(Lit):
    """Process 0 gets a signal in the validation behind the fourth epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero and self.trainer.current_epoch == 3 and not self.trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().validation_step(batch, batch_idx)


def requeued(folder: Path, process: int) -> list[tuple[int, int, bool]]:
    """By fit of one Trainer: its batches, the steps that are saved, and whether this process has requeued the job."""
    commands: list[Any] = []
    callback, found = Signalled(0, signal.SIGUSR1), []

    class Handles(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            # as Lightning registers it under SLURM
            handler = trainer._signal_connector._slurm_sigusr_handler_fn
            signal.signal(signal.SIGUSR1, handler)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")
        patch.setattr(signal_connector, "call", lambda command, **_: commands.append(command) or 0)
        trainer, module = trainer_with(callback, folder, limit_val_batches=2), InValidation().double()
        trainer.callbacks.append(Handles())
        for run in (1, 2):
            callback.batches = 0 if run == 1 else AT + 1
            trainer.fit_loop.max_epochs = 3 * run
            trainer.fit(module, datamodule=Data())
            saved = torch.load(folder / f"hpc_ckpt_{run}.ckpt", weights_only=False)
            asked = commands == [["scontrol", "requeue", "7"]] * run
            found.append((callback.batches, saved["global_step"], asked))
    return found


CALLS["requeued"] = requeued


@pytest.mark.feature("Plugins", "SLURMEnvironment that requeues", "works", "all processes save after the same batch")
@pytest.mark.parametrize("run", ["requeued"])
def test_a_job_to_be_requeued_is_saved_by_all_after_the_batch(run: str, found: Found) -> None:
    """In the second fit of a Trainer, too, where the signal comes in a validation."""
    first, second = found[run]
    batches = first[0][0]
    saved = [(batches, AT + 2), (batches + AT + 1, batches + batches // 3 + 1)]
    assert batches > AT + 2  # goes on: SLURM ends it
    assert first == [(*each, True) for each in saved]
    assert second == [(*each, False) for each in saved]
