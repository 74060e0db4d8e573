"""Which loop is active is found out anew when the Trainer's state changes, and only then."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_pipe.trainer.active_loop import active_loop_kept


def trainer() -> Any:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_each_stage_has_its_loop() -> None:
    one, other = trainer(), trainer()
    with active_loop_kept():
        assert one._active_loop is None
        one.state.fn, one.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
        assert one._active_loop is one.fit_loop
        one.state.stage = RunningStage.SANITY_CHECKING
        assert one._active_loop is one.fit_loop.epoch_loop.val_loop
        one.state.fn, one.state.stage = TrainerFn.VALIDATING, RunningStage.VALIDATING
        other.state.fn, other.state.stage = TrainerFn.PREDICTING, RunningStage.PREDICTING
        for _ in range(2):
            assert one._active_loop is one.validate_loop
            assert other._active_loop is other.predict_loop
        one.state.stage = None
        assert one._active_loop is None


def test_the_trainers_own_property_comes_back() -> None:
    before = vars(L.Trainer)["_active_loop"]
    with active_loop_kept():
        assert vars(L.Trainer)["_active_loop"] is not before
    assert vars(L.Trainer)["_active_loop"] is before
