"""What stages before the last one read as it was before the batch, and one device does not, is an error."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET

WIDTH = 3
DATA = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).double()
OLD = "and reads it before it calls the layers"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Model(L.LightningModule):
    """Multiplies by its gain behind the first layer; derived classes say who changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.gain: Any = 1.0
        self.set_up()

    def set_up(self) -> None:
        """Hooks, and another gain."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain

    def behind(self) -> None:
        self.gain = self.gain * 0.9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.between(self.layers[0](batch[0]))
        loss = self.layers[1:](hidden).pow(2).mean()
        self.behind()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByAHook(Model):
    def set_up(self) -> None:
        self.layers[0].register_forward_hook(lambda module, given, result: result * self.gain)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


class ByAnInnerHook(ByAHook):
    def set_up(self) -> None:
        self.layers[1].linear.register_forward_hook(lambda module, given, result: result * self.gain)


class ByAMethod(ByAHook):
    def set_up(self) -> None:
        self.layers[0].register_forward_pre_hook(self.multiplied)

    def multiplied(self, module: nn.Module, given: Any) -> Any:
        return (given[0] * self.gain,)


class LargeBuffer(Model):
    def set_up(self) -> None:
        del self.gain
        self.register_buffer("gain", torch.ones(200, WIDTH))

    def between(self, hidden: Tensor) -> Tensor:
        self.gain.mul_(0.9)
        return hidden * self.gain.mean()

    def behind(self) -> None:
        pass


class FromTheBatch(ByAHook):
    """Each stage computes it by itself, and reads it then."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.gain = 1 + float(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def behind(self) -> None:
        pass


class ReadBehind(ByAHook):
    """A moving average that nothing but code behind the layers reads."""

    def set_up(self) -> None:
        pass


class InAHook(ByAHook):
    def behind(self) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        self.gain *= 0.9


class Listens(L.Callback):
    def on_train_start(self, *_: Any) -> None:
        warnings.simplefilter("always")


def said(process: int, models: list[type[Model]], **options: Any) -> list[list[str]]:
    """The warnings about each model on this rank."""
    found = []
    for model in models:
        with warnings.catch_warnings(record=True) as caught:
            strategy = PipeStrategy(layers="layers", **options)
            settings = {**QUIET, "max_epochs": 1, "limit_val_batches": 0, "callbacks": [Listens()]}
            trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **settings)
            trainer.fit(model().double(), DataLoader(TensorDataset(DATA), 4))
        found.append([str(one.message) for one in caught if "`self.gain`" in str(one.message)])
    return found


OLDS: list[type[Model]] = [Model, ByAHook, ByAnInnerHook, ByAMethod]
FINE: list[type[Model]] = [FromTheBatch, ReadBehind, InAHook]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [*OLDS, LargeBuffer])
def test_what_is_old_on_the_first_stage_raises_at_the_call(model: type[Model]) -> None:
    with pytest.raises(CutError, match=r"is given other values here than on the stage before"):
        run_trainers(said, 2, timeout=50, models=[model], micro_batches=2)


@pytest.mark.timeout(60)
def test_what_no_call_is_given_raises_and_warns_of_nothing() -> None:
    for found in run_trainers(said, 2, timeout=50, models=FINE, micro_batches=2):
        assert not any(found)


@pytest.mark.timeout(60)
def test_one_micro_batch_finds_what_the_batch_before_it_has_left() -> None:
    for found in run_trainers(said, 2, timeout=50, models=OLDS, micro_batches=1):
        assert not any(found)


@pytest.mark.timeout(60)
def test_with_several_pipes_a_rank_warns_too() -> None:
    for found in run_trainers(said, 2, timeout=50, models=[ByAHook], micro_batches=2, schedule="chimera"):
        assert any(OLD in text for text in found[0])
