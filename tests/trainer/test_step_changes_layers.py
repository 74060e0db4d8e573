"""What the step makes of an attribute of a layer by its own value is what one device makes, or an error names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.pairs import pairs
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCH = 3, 16, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()
WAITS: Mapping[str, Any] = {"stream_evaluation": False}
CHIMERA: Mapping[str, Any] = {"schedule": "chimera", "micro_batches": 2}


class Layer(nn.Module):
    """Multiplies by what the step sets, and keeps nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale, self.table = 1.0, {"gain": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale * self.table["gain"]


class Model(L.LightningModule):
    """Four such layers; derived classes say what is done with them.

    Args:
        parts: the micro-batches of a batch that come as batches of their own.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.parts, self.read = parts, []

    def before(self, batch: int) -> None:
        """Code of the step before the layers."""

    def behind(self, batch: int) -> None:
        """Code of the step behind the layers."""

    def step(self, x: Tensor, number: int) -> Tensor:
        self.before(number // self.parts)
        factor = self.layers[0].scale * self.layers[3].scale * self.layers[1].table["gain"]
        out = self.layers(x * factor).pow(2).mean()
        self.behind(number // self.parts)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch[0], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.step(batch[0], batch_idx * self.parts))

    def state(self) -> list[float]:
        """What hooks read of the layers."""
        return [layer.scale * layer.table["gain"] for layer in self.layers]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.read += self.state()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scales(Model):
    def before(self, batch: int) -> None:
        for layer in self.layers:
            layer.scale *= 0.9


class ScalesLate(Model):
    """Begins in a batch in which no run is looked at any more."""

    def before(self, batch: int) -> None:
        if batch > 1:
            for layer in self.layers:
                layer.scale *= 0.9


class ScalesInPlace(Model):
    def before(self, batch: int) -> None:
        for layer in self.layers:
            layer.table["gain"] *= 0.9


class Replaces(Model):
    """Sets what does not depend on the value before."""

    def before(self, batch: int) -> None:
        for layer in self.layers:
            layer.scale = 0.9**batch
            layer.table["gain"] = 1.1**batch


class Counts(Model):
    """Sets by what it counts."""

    count = 0

    def before(self, batch: int) -> None:
        self.count += 1
        for layer in self.layers:
            layer.scale = 1 / self.count


class CountsItself(Counts):
    """Makes the counter, too."""

    def before(self, batch: int) -> None:
        if "count" not in vars(self):
            self.count = 0
        super().before(batch)


class SetsByTheBatch(Model):
    """What each stage computes alike, for each micro-batch another value; or none that equals itself."""

    def step(self, x: Tensor, number: int) -> Tensor:
        for layer in self.layers:
            layer.scale, layer.mark = 1 + float(x.mean()), float("nan")
        return super().step(x, number)


class ScalesAndAdds(Scales):
    def behind(self, batch: int) -> None:
        for layer in self.layers:
            layer.scale += 0.03


class ReadsNothingElse(ScalesAndAdds):
    """Its step reads no attributes but those of layers."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.before(0)
        out = self.layers(batch[0]).pow(2).mean()
        self.behind(0)
        self.log("value", out)


class ScalesInHook(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.parts == 0:
            for layer in self.layers:
                layer.scale *= 0.9
                layer.table["gain"] *= 0.9


def trained(process: int, devices: int | None, model: type[Model], micro_batches: int, **options: Any) -> list[float]:
    """What hooks read of the layers, and all parameters and buffers at the end."""
    quiet()
    L.seed_everything(7, verbose=False)
    accumulated = 1 if devices else micro_batches
    module = model(accumulated).double()
    strategy: Any = PipeStrategy(layers="layers", micro_batches=micro_batches, **options) if devices else "auto"
    settings = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": accumulated, "limit_val_batches": 0}
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)
    trainer.fit(module, DataLoader(TensorDataset(DATA), BATCH // accumulated))
    left = torch.cat([value.detach().flatten() for value in module.state_dict().values()])
    return [*module.read, *module.state(), *left.tolist()]


def evaluated(process: int, devices: int | None, model: type[Model], **options: Any) -> list[float]:
    """What two evaluations log, and what is read of the layers behind each."""
    quiet()
    L.seed_everything(7, verbose=False)
    module, values = model(1).double(), list[float]()
    for _ in range(2):
        strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
        trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **{**QUIET, "max_epochs": 1})
        trainer.validate(module, DataLoader(TensorDataset(DATA), 2), verbose=False)
        values += [float(trainer.callback_metrics["value"]), *module.state()]
    return values


def check_training(model: type[Model], devices: int = 2, micro_batches: int = 1, **options: Any) -> None:
    """All ranks have what one device has that gets the micro-batches one after the other."""
    plain = trained(0, None, model, micro_batches)
    options.update(devices=devices, model=model, micro_batches=micro_batches)
    runs = run_trainers(trained, devices, timeout=40, **options) if devices > 1 else [trained(0, **options)]
    for values in runs:
        assert values == pytest.approx(plain, rel=1e-9)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "devices", "options"),
    pairs(
        [Scales, ScalesLate, ScalesInPlace, Replaces],
        [
            (2, {"micro_batches": 2}),
            (1, {"micro_batches": 2, "stages": 2}),
            (2, {"micro_batches": 1, "schedule": "dualpipev"}),
            (2, {"micro_batches": 4, "schedule": "dualpipev"}),
            (2, {"micro_batches": 2, "stages": 4, "schedule": "interleaved"}),
            (2, {"micro_batches": 2, "stages": 4, "schedule": "interleaved", "recompute": "always"}),
        ],
    ),
)
def test_what_the_step_changes_before_the_layers_equals_one_device(
    model: type[Model], devices: int, options: dict[str, Any]
) -> None:
    check_training(model, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "options"),
    pairs(
        [Counts, CountsItself],
        [
            {"schedule": "1f1b"},
            {"schedule": "gpipe", "recompute": "always"},
            {"stages": 4, "schedule": "interleaved"},
            {"schedule": "dualpipev"},
        ],
    ),
)
def test_what_is_set_by_what_other_micro_batches_have_left_is_refused(
    model: type[Model], options: dict[str, Any]
) -> None:
    with pytest.raises(CutError, match=r"(the step sets|have changed) `self\.(\w+`, `self\.)*layers\.\d\.scale`"):
        check_training(model, micro_batches=4, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, {"micro_batches": 4, "schedule": "dualpipev"}], ids=str)
def test_what_each_stage_sets_alike_equals_one_device(options: dict[str, Any]) -> None:
    check_training(SetsByTheBatch, **options)


@pytest.mark.timeout(60)
def test_with_one_micro_batch_it_may_be_set_by_what_is_counted() -> None:
    check_training(Counts)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "name"), [(Scales, "scale"), (ScalesLate, "scale"), (ScalesInPlace, "table")], ids=str
)
def test_of_several_pipes_none_has_the_value_before_a_micro_batch(model: type[Model], name: str) -> None:
    told = rf"the step changes `self\.layers\.\d\.{name}` by its own value|have changed `self\.layers\.\d\.{name}`"
    with pytest.raises(CutError, match=told) as caught:
        check_training(model, **CHIMERA)
    assert "on_train_batch_start" in str(caught.value.hint)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Replaces, ScalesInHook])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_with_several_pipes_other_changes_equal_one_device(model: type[Model], micro_batches: int) -> None:
    check_training(model, schedule="chimera", micro_batches=micro_batches)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "options"),
    pairs(
        [Scales, ScalesInPlace, ScalesAndAdds, ReadsNothingElse, Replaces],
        [{}, WAITS, {"stages": 4, "schedule": "interleaved"}, {"schedule": "chimera"}],
    ),
)
def test_what_evaluation_steps_change_equals_one_device(model: type[Model], options: dict[str, Any]) -> None:
    plain = evaluated(0, None, model)
    for values in run_trainers(evaluated, 2, timeout=40, devices=2, model=model, **options):
        assert values == pytest.approx(plain, rel=1e-9)
