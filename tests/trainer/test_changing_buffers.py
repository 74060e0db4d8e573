"""Buffers that the step changes in place while graphs of other micro-batches hold them are those of one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCH = 3, 16, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()


class Layer(nn.Module):
    """Multiplies by a buffer of its own and by one of its LightningModule: its graph holds both."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.linear, self.owner = nn.Linear(WIDTH, WIDTH), [owner]
        self.register_buffer("tau", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.tau * self.owner[0].gain


class Model(L.LightningModule):
    """Four such layers; derived classes say what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(WIDTH))
        self.layers = nn.Sequential(*(Layer(self) for _ in range(4)))

    def before(self) -> None:
        """Code of the step before the layers."""

    def behind(self) -> None:
        """Code of the step behind the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before()
        loss = self.layers(batch[0]).pow(2).mean()
        self.behind()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfTheModule(Model):
    def before(self) -> None:
        self.gain.mul_(0.9)


class OfLayers(Model):
    def before(self) -> None:
        for layer in self.layers:
            layer.tau.mul_(0.9)


class ByViews(Model):
    def before(self) -> None:
        for layer in self.layers:
            layer.tau[:2].mul_(0.9)


class ByData(Model):
    def before(self) -> None:
        for layer in self.layers:
            layer.tau.data.mul_(0.9)


class InHook(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        self.layers[0].tau.mul_(0.9)


class Broadcasts(Layer):
    """Its graph holds a view of the buffer, which is not known here."""

    def forward(self, x: Tensor) -> Tensor:
        self.tau.mul_(0.9)
        return torch.tanh(self.linear(x)) * self.tau[None]


class InCalls(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Broadcasts(self) for _ in range(4)))


def trained(process: int, devices: int | None, model: type[Model], micro_batches: int = 1, **options: Any) -> Any:
    """The parameters and buffers that a rank has at the end."""
    quiet()
    L.seed_everything(7, verbose=False)
    accumulated = 1 if devices else micro_batches
    module = model().double()
    strategy: Any = PipeStrategy(layers="layers", micro_batches=micro_batches, **options) if devices else "auto"
    settings = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": accumulated, "limit_val_batches": 0}
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)
    trainer.fit(module, DataLoader(TensorDataset(DATA), BATCH // accumulated))
    return torch.cat([value.detach().flatten() for value in module.state_dict().values()]).tolist()


def check(model: type[Model], devices: int = 2, **options: Any) -> None:
    """All ranks have what one device has that gets the micro-batches one after the other."""
    plain = trained(0, None, model, options.get("micro_batches", 1))
    options.update(devices=devices, model=model)
    for values in run_trainers(trained, devices, timeout=40, **options) if devices > 1 else [trained(0, **options)]:
        assert values == pytest.approx(plain, rel=1e-9)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{}, {"recompute": "always"}], ids=str)
def test_what_layers_read_of_their_module_in_one_micro_batch(options: dict[str, Any]) -> None:
    check(OfTheModule, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [OfLayers, ByViews, ByData])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_the_step_changes_of_its_layers_is_refused(model: type[Model], micro_batches: int) -> None:
    with pytest.raises(CutError, match=r"changes `self\.layers\.0\.tau` in place in the step") as caught:
        run_trainers(trained, 2, timeout=40, devices=2, model=model, micro_batches=micro_batches)
    assert "on_train_batch_end" in str(caught.value.hint)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [OfLayers, ByViews, ByData])
def test_where_all_layers_are_together_it_equals_one_device(model: type[Model]) -> None:
    check(model, 1, micro_batches=4, stages=1, schedule="gpipe")


@pytest.mark.timeout(60)
def test_the_hook_that_errors_advise_equals_one_device() -> None:
    check(InHook)


def test_what_graphs_hold_views_of_is_refused() -> None:
    with pytest.raises(CutError, match=r"a tensor \[torch\.DoubleTensor \[.*3\]\] that has changed in place since"):
        trained(0, 1, InCalls, micro_batches=2, schedule="gpipe")
