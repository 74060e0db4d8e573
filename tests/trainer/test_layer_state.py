"""What layers keep of their calls goes on from Trainer to Trainer; the state contract has what others do with it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
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
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.items.append(float(x.detach().mean()))
        self.counts["of"]["n"] += 1
        hidden = torch.tanh(self.linear(x))
        if self.state is not None:
            hidden = hidden + 0.1 * self.state
        self.state = hidden.detach().mean(0)
        return hidden * (1 + 0.01 * (self.calls + sum(self.items) + self.counts["of"]["n"]))


class Model(L.LightningModule):
    """Four such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def before(self, resets: bool) -> None:
        """Code of the step before the layers."""

    def step(self, x: Tensor, resets: bool) -> Tensor:
        self.before(resets)
        return self.layers(x).pow(2).mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch[0], self.trainer.global_step % 2 == 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.step(batch[0], batch_idx % 2 == 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def found(process: int, devices: int | None, model: type[Model], **options: Any) -> dict[str, float]:
    """What evaluations log, before the training and after it."""
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
        evaluates = trainer()
        evaluates.validate(module, DataLoader(TensorDataset(DATA), BATCH), verbose=False)
        values[str(trains)] = float(evaluates.callback_metrics["value"])
    return values


def check(model: type[Model], devices: int = 2, **options: Any) -> None:
    """All ranks have what one device has."""
    plain = found(0, None, model, micro_batches=options.get("micro_batches", 1))
    runs = run_trainers(found, devices, timeout=40, devices=devices, model=model, **options) if devices > 1 else None
    for values in runs or [found(0, 1, model, **options)]:
        assert values == pytest.approx(plain, rel=1e-9)


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
    [
        (Model, 2, {"micro_batches": 2}),
        (ResetsBefore, 2, {"stream_evaluation": False}),
        (Model, 1, {"micro_batches": 2, "stages": 2}),
        (ResetsBefore, 2, {"micro_batches": 1, "schedule": "dualpipev"}),
    ],
    ids=str,
)
def test_what_layers_keep_equals_one_device(model: type[Model], devices: int, options: dict[str, Any]) -> None:
    """A second Trainer goes on with what the first one has left."""
    check(model, devices, **options)


class LooksAhead(Layer):
    """Computes with what another layer of its stage keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[Layer] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + sum(0.1 * other.calls for other in self.at))


class LooksInItsStage(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = LooksAhead()
        self.layers[0].at.append(self.layers[1])


@pytest.mark.timeout(60)
def test_what_a_layer_reads_in_its_stage_equals_one_device() -> None:
    """Also where activations are computed again."""
    check(LooksInItsStage, micro_batches=2, recompute="always")
