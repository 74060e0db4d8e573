"""Evaluation steps that leave layers out work as on one device; what ends a step early must not be caught."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor

from tests.support import oracle
from tests.support.lit_modules import Data, Lit
from tests.support.trainer_runs import QUIET, quiet


class LeavesOut(Lit):
    """Which layers an evaluation calls depends on the batch's number, or is said once and for all."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls, self.counted = calls, 0
        self.sizes = torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.counted += 1
        self.sizes.update(len(batch[0]))
        self.log("constant", 3.0)
        self.log("size", float(len(batch[0])), reduce_fx="sum")
        self.log("sizes", self.sizes)
        self.log("mean", batch[0].mean())
        if self.calls == "none" or (self.calls == "some" and batch_idx % 2):
            return None
        h = self.embed(batch[0].flatten(1))
        if self.calls == "embedding":
            self.log("embedded", h.mean())
            return h.mean()
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("counted", float(self.counted))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", batch[0].mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].flatten(1).mean(1)


def evaluated(process: int, calls: str, devices: int | None, **options: Any) -> dict[str, Any]:
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    strategy = PipeStrategy(layers="model", micro_batches=1, **options) if devices else "auto"
    mode = {"inference_mode": False, **QUIET}  # torchmetrics' sums cannot leave it
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, max_epochs=2, **mode)
    module, data = LeavesOut(calls).double(), Data()
    found: dict[str, Any] = {"validate": trainer.validate(module, data.val_dataloader(), verbose=False)}
    trainer.fit(module, data.train_dataloader(), data.val_dataloader())
    found["fit"], found["counted"] = oracle.numbers(trainer.callback_metrics), module.counted
    found["test"] = trainer.test(module, data.val_dataloader(), verbose=False)
    found["predict"] = torch.cat(trainer.predict(module, data.val_dataloader())).tolist()
    return found


CALLS = ("none", "some", "embedding")


def evaluated_all(process: int, devices: int | None, **options: Any) -> dict[str, dict[str, Any]]:
    return {calls: evaluated(process, calls, devices, **options) for calls in CALLS}


def assert_same(found: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]) -> None:
    for calls in CALLS:
        for name in ("counted", "predict"):
            assert found[calls][name] == plain[calls][name], (calls, name)
        for name in ("validate", "test"):
            assert found[calls][name][0] == pytest.approx(plain[calls][name][0]), (calls, name)
        assert found[calls]["fit"] == pytest.approx(plain[calls]["fit"]), calls


@pytest.mark.feature("Hooks", "validate, test and predict before and after fit", "works")
def test_leaving_layers_out() -> None:
    assert_same(evaluated_all(0, 1, stages=2), evaluated_all(0, None))


class Inferring(Lit):
    """Updates a metric that was reset behind the last evaluation, and says in which mode it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        assert not self.seen.sum_value.is_inference()
        self.seen.update(torch.is_inference_mode_enabled())
        self.log("inference", self.seen)


def test_evaluations_run_outside_of_inference_mode() -> None:
    from lightning_pipe import PipeStrategy

    strategy = PipeStrategy(layers="model", stages=2, micro_batches=1)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **QUIET)
    for _ in range(2):
        assert trainer.validate(Inferring().double(), Data(), verbose=False)[0]["inference"] == 0.0


class CatchesAll(Lit):
    """Goes on with zeros, whatever is raised around the layers."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except BaseException:
            return torch.zeros(len(x), 4, dtype=x.dtype, requires_grad=True)


@pytest.mark.parametrize("what", ["fit", "validate"])
def test_a_step_that_catches_what_ends_it_is_refused(what: str) -> None:
    from lightning_pipe import PipeStrategy
    from lightning_pipe.errors import CutError

    strategy = PipeStrategy(layers="model", stages=2, micro_batches=1)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    with pytest.raises(CutError, match="catches what ends its run on a stage before the last one") as caught:
        getattr(trainer, what)(CatchesAll().double(), Data())
    assert "Catch Exception" in str(caught.value.hint)
