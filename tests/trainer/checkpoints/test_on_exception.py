"""Checkpoints that are to be written when a run fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_pipe import PipeStrategy
from tests.support.lit_modules import Data, Lit
from tests.support.trainer_runs import QUIET


class Fails(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ValueError("the reason")


def trainer(folder: Path, **strategy: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PipeStrategy(compare_losses=False, **strategy),
        max_epochs=1,
        callbacks=[OnExceptionCheckpoint(folder)],
        **{**QUIET, "limit_val_batches": 0, "enable_checkpointing": True},
    )


def test_a_single_stage_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the reason"):
        trainer(tmp_path).fit(Fails().double(), datamodule=Data())
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == 3
    assert saved["optimizer_states"][0]["state"]


@pytest.mark.feature(
    "Callbacks",
    "OnExceptionCheckpoint",
    "differs",
    "when a rank of several fails nothing is written, and a warning says so",
)
def test_what_cannot_be_gathered_is_not_written_and_said(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="the reason"),
        pytest.warns(UserWarning, match=r"on_exception\.ckpt was not written: after an error"),
    ):
        trainer(tmp_path, save_distributed_checkpoint=True).fit(Fails().double(), datamodule=Data())
    assert not list(tmp_path.iterdir())
