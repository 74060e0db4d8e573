"""What looks at batches besides the steps."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import pytest
from lightning.pytorch import callbacks

from lightning_pipe.trainer.data.batch_hooks import are_looked_at, hooks_between
from tests.support.trainer_runs import QUIET

NAMES = ("training_step", "validation_step", "test_step", "predict_step")


class Own(L.Callback):
    def on_test_batch_end(self, *_: object) -> None:
        pass


class Writer(callbacks.BasePredictionWriter):
    """Looks at predictions only, but might look at their batches."""


CASES: dict[str, tuple[Callable[[], L.Callback], list[str]]] = {
    "none": (L.Callback, []),
    "Lightning's": (callbacks.Timer, []),
    "the user's": (Own, ["test_step"]),
    "given functions": (
        lambda: callbacks.LambdaCallback(on_train_batch_start=lambda trainer, module, batch, index: None),
        ["training_step"],
    ),
    "throughput": (lambda: callbacks.ThroughputMonitor(len), list(NAMES)),
    "predictions": (lambda: Writer("batch"), list(NAMES)),
}


def attached(callback: L.Callback, module: L.LightningModule) -> L.LightningModule:
    trainer = L.Trainer(accelerator="cpu", callbacks=[callback], **QUIET)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return module


@pytest.mark.parametrize("case", CASES)
def test_callbacks(case: str) -> None:
    make, expected = CASES[case]
    module = attached(make(), L.LightningModule())
    assert [name for name in NAMES if are_looked_at(module, name)] == expected


class Transfers(L.LightningModule):
    def on_after_batch_transfer(self, batch: object, dataloader_idx: int) -> object:
        return batch


class Ends(L.LightningModule):
    def on_train_batch_end(self, *_: object) -> None:
        pass


def test_hooks_of_the_module() -> None:
    transfers, ends = attached(L.Callback(), Transfers()), attached(L.Callback(), Ends())
    assert list(hooks_between(transfers, "test_step")) == ["Transfers.on_after_batch_transfer"]
    assert list(hooks_between(ends, "training_step")) == ["Ends.on_train_batch_end"]
    assert list(hooks_between(ends, "validation_step")) == []
