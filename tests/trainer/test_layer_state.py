"""What layers keep of their calls, while others read and change it, is what one device keeps, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from tests.support.pairs import pairs
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCH = 3, 16, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()


class Layer(nn.Module):
    """Computes with what it keeps of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.items, self.counts = 0, [0.0], {"of": {"n": 0}}
        self.table = {"scale": 1.0}
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.items.append(float(x.detach().mean()))
        self.counts["of"]["n"] += 1
        hidden = torch.tanh(self.linear(x)) * self.table["scale"]
        if self.state is not None:
            hidden = hidden + 0.1 * self.state
        self.state = hidden.detach().mean(0)
        return hidden * (1 + 0.01 * (self.calls + sum(self.items) + self.counts["of"]["n"]))


class Model(L.LightningModule):
    """Four such layers; derived classes say what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.count, self.scale = 0, 1.0

    def before(self, resets: bool) -> None:
        """Code of the step before the layers."""

    def behind(self, resets: bool) -> None:
        """Code of the step behind the layers."""

    def step(self, x: Tensor, resets: bool) -> Tensor:
        self.before(resets)
        out = self.layers(x * self.scale).pow(2).mean()
        self.behind(resets)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch[0], self.trainer.global_step % 2 == 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.step(batch[0], batch_idx % 2 == 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def found(process: int, devices: int | None, model: type[Model], **options: Any) -> dict[str, float]:
    """What evaluations log, before the training and after it, and what the module counts."""
    quiet()
    micro_batches = options.setdefault("micro_batches", 1)
    L.seed_everything(7, verbose=False)
    module = model().double()
    values = {}
    for trains in (False, True):

        def trainer(**settings: Any) -> L.Trainer:
            strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
            settings = {**QUIET, **settings, "max_epochs": 1}
            return L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)

        if trains:
            parts = 1 if devices else micro_batches
            fits = trainer(accumulate_grad_batches=parts, limit_val_batches=0)
            fits.fit(module, DataLoader(TensorDataset(DATA), BATCH // parts))
            values["count after training"] = float(module.count)
        evaluates = trainer()
        evaluates.validate(module, DataLoader(TensorDataset(DATA), BATCH), verbose=False)
        values[f"{trains} value"] = float(evaluates.callback_metrics["value"])
        values[f"{trains} count"] = float(module.count)
    return values


def check(model: type[Model], devices: int = 2, **options: Any) -> None:
    """All ranks have what one device has."""
    plain = found(0, None, model, micro_batches=options.get("micro_batches", 1))
    runs = run_trainers(found, devices, timeout=40, devices=devices, model=model, **options) if devices > 1 else None
    for values in runs or [found(0, 1, model, **options)]:
        assert values == pytest.approx(plain, rel=1e-9)


WAITS: Mapping[str, Any] = {"stream_evaluation": False}


class ResetsBefore(Model):
    """Where a layer runs, it finds what the step has set before it."""

    def before(self, resets: bool) -> None:
        if resets:
            for layer in self.layers:
                layer.state = None
                layer.calls, layer.items, layer.counts = 0, [], {"of": {"n": 0}}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "devices", "options"),
    pairs(
        [Model, ResetsBefore],
        [
            (2, {}),
            (2, WAITS),
            (2, {"micro_batches": 2}),
            (2, {"micro_batches": 2, "recompute": "always"}),
            (1, {"micro_batches": 2, "stages": 2}),
            (2, {"micro_batches": 4, "stages": 4, "schedule": "interleaved"}),
            (2, {"micro_batches": 1, "schedule": "dualpipev"}),
        ],
    ),
)
def test_what_layers_keep_equals_one_device(model: type[Model], devices: int, options: dict[str, Any]) -> None:
    """However often the step runs for a micro-batch: once for each stage of a rank, and again to compute activations.

    A second Trainer goes on with what the first one has left.
    """
    check(model, devices, **options)


class SetsBehind(Model):
    def behind(self, resets: bool) -> None:
        self.layers[0].calls = 0


class ReadsInHooks(Model):
    """A hook computes with what layers keep."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 1.0 + sum(0.01 * layer.calls for layer in self.layers)


class ReadsAtTheEnd(Model):
    def on_validation_epoch_end(self) -> None:
        self.scale = 1.0 + sum(0.1 * sum(layer.items) for layer in self.layers)


class Looks(Layer):
    """Computes with what another layer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[Layer] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + sum(0.1 * other.calls for other in self.at))


class LooksAhead(Model):
    """Trains with one batch alone: the error must come at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Looks()
        self.layers[0].at.append(self.layers[3])

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = True


class LooksInItsStage(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Looks()
        self.layers[0].at.append(self.layers[1])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [SetsBehind, ReadsInHooks, ReadsAtTheEnd, LooksAhead])
@pytest.mark.parametrize("options", [{}, {"stages": 4, "schedule": "interleaved", "micro_batches": 2}], ids=str)
def test_what_other_stages_keep_is_refused(model: type[Model], options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"self\.layers\.\d\.(calls|items)|'layers.0', .* is given other values"):
        check(model, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2, "recompute": "always"}], ids=str)
def test_what_a_layer_reads_in_its_stage_equals_one_device(options: dict[str, Any]) -> None:
    check(LooksInItsStage, **options)


class Scales(Model):
    """By its own value."""

    def before(self, resets: bool) -> None:
        self.layers[0].gain = getattr(self.layers[0], "gain", 1.0) * 0.9
        self.layers[0].table = {"scale": self.layers[0].gain}


class ScalesBehind(Model):
    def behind(self, resets: bool) -> None:
        self.layers[0].table = {"scale": self.layers[0].table["scale"] * 0.9}


class SetsByTheBatch(Model):
    """Alike on all stages, and for each micro-batch another value."""

    def step(self, x: Tensor, resets: bool) -> Tensor:
        for layer in self.layers:
            layer.table = {"scale": 1 + float(x.mean()), "mark": float("nan")}
        return super().step(x, resets)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "devices", "options"),
    [
        (Scales, 2, {}),
        (ScalesBehind, 2, {}),
        (ScalesBehind, 2, {"schedule": "dualpipev", "micro_batches": 1}),
        (SetsByTheBatch, 2, {"micro_batches": 2}),
        (SetsByTheBatch, 2, {"micro_batches": 4, "stages": 4, "schedule": "interleaved"}),
        (SetsByTheBatch, 2, {"micro_batches": 2, "recompute": "always"}),
    ],
    ids=str,
)
def test_what_the_step_sets_equals_one_device(model: type[Model], devices: int, options: dict[str, Any]) -> None:
    check(model, devices, **options)


class ChangesInPlace(Model):
    def before(self, resets: bool) -> None:
        self.layers[0].table["scale"] *= 0.9


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Scales, r"have changed .*self\.layers\.0\.gain"),
        (
            ScalesBehind,
            r"the step changes `self\.layers\.0\.table` behind 'layers\.0'|have changed .*`self\.layers\.0\.table`",
        ),
        (ChangesInPlace, r"the step changes what `self\.layers\.0\.table` refers to"),
    ],
)
def test_what_other_micro_batches_have_left_is_refused(model: type[Model], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run_trainers(found, 2, timeout=40, devices=2, model=model, micro_batches=2, **WAITS)


class ChangesShared(Model):
    """Changes a list that a layer holds, too, and that no layer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = [1.0]
        self.layers[0].own = self.own

    def step(self, x: Tensor, resets: bool) -> Tensor:
        self.own[0] *= 0.9
        return self.layers(x * self.layers[0].own[0]).pow(2).mean()


@pytest.mark.timeout(60)
def test_what_the_step_changes_stays_the_same_object_for_layers_that_hold_it() -> None:
    check(ChangesShared, **WAITS)
