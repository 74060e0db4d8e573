"""An error in the user's code is shown without the frames of this package, on the rank that it happens on."""

from __future__ import annotations

import traceback
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import PipeStrategy
from lightning_pipe.trainer import user_step
from lightning_pipe.trainer.frames import SHOW
from tests.support.lit_modules import Data, Lit
from tests.support.processes import outcomes
from tests.support.trainer_runs import QUIET, quiet


class Raising(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("in a layer")


class InALayer(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model[2] = Raising(16, 16)


class InTorch(Lit):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.embed(x.flatten(1))) @ torch.ones(3, 3, dtype=x.dtype)


class InAHook(Lit):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("in a hook")


class FromAnother(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            return super().training_step(batch[:1], batch_idx)
        except ValueError as error:
            raise RuntimeError("no such batch") from error


class NotALoss(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return "loss"


def failure(module: L.LightningModule, devices: int = 1) -> str:
    quiet()
    strategy = PipeStrategy(stages=2, micro_batches=2)
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **QUIET)
    try:
        trainer.fit(module.double(), datamodule=Data(length=8))
    except Exception as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("no error")


def own_frames(text: str) -> list[str]:
    return [line for line in text.splitlines() if "/lightning_pipe/" in line]


@pytest.mark.parametrize("kind", [InALayer, InTorch, FromAnother, NotALoss], ids=lambda kind: kind.__name__)
def test_own_frames_are_hidden_and_can_be_shown(kind: type[Lit], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = failure(kind())
    assert not own_frames(hidden)
    assert SHOW in hidden
    assert kind is NotALoss or __file__ in hidden
    monkeypatch.setenv(SHOW, "1")
    shown = failure(kind())
    assert own_frames(shown)
    assert SHOW not in shown


def test_errors_of_hooks_have_no_frames_to_hide() -> None:
    assert not own_frames(failure(InAHook()))


def test_a_bug_in_the_package_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_step, "merge", int)
    assert own_frames(failure(Lit()))


def fail(process: int, kind: type[Lit]) -> str:
    return failure(kind(), devices=2)


def test_on_every_rank() -> None:
    texts = [outcome.value for outcome in outcomes(fail, 2, timeout=60, group_timeout=None, kind=InALayer)]
    assert any("in a layer" in text for text in texts)
    assert all(len(own_frames(text)) == 0 for text in texts)
