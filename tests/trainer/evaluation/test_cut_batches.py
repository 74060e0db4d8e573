"""Evaluation batches that are cut into micro-batches give what whole batches give, where it is clear what that is."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.evaluated_modules import Evaluated, Steps, loader
from tests.support.trainer_runs import QUIET, quiet


class Rows(Evaluated):
    """Notes how many rows its layers get at once."""

    most: int = 0

    def forward(self, x: Tensor) -> Tensor:
        Rows.most = max(Rows.most, len(x))
        return super().forward(x)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy)
        self.log("rows", float(len(x)), reduce_fx="sum")
        return loss

    def on_validation_epoch_end(self) -> None:
        pass

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"class": self(batch[0]).argmax(-1), "names": [str(int(y)) for y in batch[1]]}


class Counted(Rows):
    """Returns a number of which nothing says how it joins."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"rows": len(self(batch[0]))}


def evaluated(model: type[Evaluated], strategy: Any) -> tuple[Any, ...]:
    quiet()
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **{**QUIET, "logger": (steps := Steps())})
    module = model().double()
    trainer.validate(module, loader(), verbose=False)
    return oracle.numbers(trainer.callback_metrics), steps.logged, trainer.predict(module, loader())


def test_cut_batches_equal_whole_ones() -> None:
    plain = evaluated(Rows, "auto")
    assert Rows.most == 4
    for stages in (1, 2):
        Rows.most = 0
        found = evaluated(Rows, PipeStrategy(layers="model", stages=stages, evaluation_micro_batches=2))
        assert Rows.most == 2
        assert found[0] == pytest.approx(plain[0], rel=1e-9)
        for one, other in zip(found[1], plain[1], strict=True):
            assert one == pytest.approx(other, rel=1e-9)
        for one, other in zip(found[2], plain[2], strict=True):
            assert torch.equal(one.pop("class"), other["class"])
            assert one == {name: value for name, value in other.items() if name != "class"}


def test_what_joins_in_no_clear_way_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"outputs\['rows'\].*not known how"):
        evaluated(Counted, PipeStrategy(layers="model", stages=2, evaluation_micro_batches=2))


def test_a_batch_has_at_least_one_micro_batch() -> None:
    with pytest.raises(ConfigurationError, match="evaluation_micro_batches=0"):
        PipeStrategy(evaluation_micro_batches=0)
