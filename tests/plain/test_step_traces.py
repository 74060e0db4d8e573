"""What a step sets is on all ranks, or an error says why it cannot be; what it draws twice is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lightning_pipe import Pipeline, PipeStrategy
from lightning_pipe.errors import CutError, RepeatedRunError
from tests.support.processes import run_trainers, run_world
from tests.support.trainer_runs import QUIET, quiet

SECONDS = 40
DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
UNSENT = r"`self\.scale` to something that cannot be pickled(.|\n)*a hook such as setup or on_train_batch_start"


class Scales(L.LightningModule):
    """Has a function that a step or a hook puts in the place of another one."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.scale: Callable[[float], float] = lambda value: value
        self.scales: list[float] = []
        self._sets = hook
        if hook == "on_train_batch_start":
            setattr(self, hook, lambda *_: self._set())

    def _set(self) -> None:
        self.scale = lambda value: 2 * value

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        if self._sets == "training_step":
            self._set()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.scale(1.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def scales(process: int, devices: int, hook: str) -> list[float]:
    """What hooks behind the batches find."""
    quiet()
    module = Scales(hook)
    strategy = PipeStrategy(layers="layers", micro_batches=2) if devices > 1 else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(DATA), 4))
    return module.scales


@pytest.mark.timeout(60)
def test_what_cannot_be_sent_is_set_in_hooks() -> None:
    with pytest.raises(CutError, match=UNSENT):
        run_trainers(scales, 2, timeout=SECONDS, devices=2, hook="training_step")
    assert run_trainers(scales, 2, timeout=SECONDS, devices=2, hook="on_train_batch_start") == [[2.0, 2.0]] * 2
    assert scales(0, 1, "training_step") == [2.0, 2.0]


class Net(nn.Module):
    """Has numbers that steps take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.numbers = iter(range(1, 100))


def loss(process: int, micro_batches: int) -> float:
    """Of a step that takes a number behind the layers for each micro-batch."""
    model = Net()
    pipeline = Pipeline(model, layers="blocks", micro_batches=micro_batches)
    return float(pipeline.train(lambda part: F.mse_loss(model.blocks(part) * next(model.numbers), part), DATA))


def test_what_is_drawn_twice_is_refused() -> None:
    """Losses are looked at in the first batch, whose micro-batches run once more for it."""
    with pytest.raises(RepeatedRunError, match=r"self\.numbers"):
        run_world(loss, 2, timeout=SECONDS, micro_batches=2)


class Counts(Net):
    hooked, steps = False, 0


def evaluated(process: int, divided: bool) -> tuple[list[float], int, int]:
    """What a step returns that comes back to the blocks for some batches; what it counts; the hooks that it leaves."""
    model = Counts()

    def step(batch: Tensor) -> Tensor:
        if not model.hooked:
            model.blocks[0].register_forward_hook(lambda *given: given[2] + 1)
            model.hooked = True
        model.steps += 1
        out = model.blocks(batch)
        return (model.blocks(out) if batch[0, 0] > 0 else out).sum().detach()

    batches = [-DATA.abs(), DATA.abs(), -DATA.abs()]
    pipeline = Pipeline(model, layers="blocks") if divided else None
    found = map(step, batches) if pipeline is None else pipeline.evaluate(step, batches)
    return [float(each) for each in found], model.steps, len(model.blocks[0]._forward_hooks)


def test_batches_of_which_some_come_back_to_layers_count_once() -> None:
    returned, *counted = evaluated(0, False)
    assert counted == [3, 1]
    for found in run_world(evaluated, 2, timeout=SECONDS, divided=True):
        assert found == (pytest.approx(returned), 3, 1)


class Measured(Net):
    """Has metrics, of what comes to the blocks and of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.made = SumMetric(), SumMetric()

    def step(self, batch: Tensor) -> Tensor:
        self.given.update(batch.sum())
        out = self.blocks(batch)
        self.made.update(out.detach().sum())
        return out.square().mean()


def measured(process: int, divided: bool) -> list[float]:
    """What the metrics have counted in training, with those of all processes, as torchmetrics has it."""
    model = Measured()
    pipeline = Pipeline(model, layers="blocks", micro_batches=2) if divided else None
    for batch in DATA.split(4):
        model.step(batch) if pipeline is None else pipeline.train(model.step, batch)
    return [float(model.given.compute()), float(model.made.compute())]


def test_a_metric_counts_what_the_last_stage_has_seen() -> None:
    expected = pytest.approx(measured(0, False), rel=1e-5)
    for found in run_world(measured, 2, timeout=SECONDS, divided=True):
        assert found == expected
