"""What the step changes behind the layers and all layers hold is the same on all ranks, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from tests.support import processes
from tests.support.pairs import pairs
from tests.trainer.test_layer_state import WIDTH, Model, check, found


class Scale:
    """A configuration."""

    def __init__(self) -> None:
        self.value, self.seen = 1.0, [1.0]


class Scaled(nn.Module):
    """A layer that reads, and keeps nothing of its calls."""

    def __init__(self, config: Scale, seen: list[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.config, self.seen, self.factor = config, seen, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.config.value * self.seen[-1] * self.config.seen[-1] * self.factor


class Shares(Model):
    """All layers and the LightningModule hold one object, and one list."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.seen = Scale(), [1.0]
        self.layers = nn.Sequential(*(Scaled(self.config, self.seen) for _ in range(4)))

    def behind(self, resets: bool) -> None:
        self.config.value *= 0.9
        self.config.seen.append(0.8)
        self.seen.append(self.seen[-1] * 0.7)


class Changes(Shares):
    """The step changes what a layer reads."""

    def behind(self, resets: bool) -> None:
        self.layers[0].factor *= 0.5


class Alternates(Shares):
    """Before the layers the step sets again what it sets behind them."""

    def before(self, resets: bool) -> None:
        self.layers[0].factor = 0.5

    def behind(self, resets: bool) -> None:
        self.layers[0].factor = 1.0


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_object_that_all_layers_hold_stays_one_object(devices: int) -> None:
    check(Shares, devices, stream_evaluation=False)


def test_an_attribute_that_other_micro_batches_have_read_raises() -> None:
    with pytest.raises(CutError, match=r"(changes|have changed) .*`self\.layers\.0\.factor`"):
        processes.run_trainers(found, 2, timeout=40, devices=2, model=Changes, micro_batches=2)


def test_what_each_micro_batch_sets_first_equals_one_device() -> None:
    options: dict[str, Any] = {"micro_batches": 2}
    check(Alternates, **options)


class Inside(nn.Module):
    """A layer whose part holds the same object."""

    def __init__(self, config: Scale, seen: list[float]) -> None:
        super().__init__()
        self.part = Scaled(config, seen)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * self.config.value


class Gives(Model):
    """The step gives all layers and their parts a new object before they are called; a hook changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Scale()
        self.layers = nn.Sequential(*(Inside(Scale(), [1.0]) for _ in range(4)))

    def before(self, resets: bool) -> None:
        if self.trainer.global_step == 0 and self.trainer.training:
            self.config = Scale()
            self.config.value = 1.1
            for layer in self.layers:
                layer.config = layer.part.config = self.config

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.config.value *= 0.9


class GivesInAList(Gives):
    """The LightningModule holds it in a list."""

    def before(self, resets: bool) -> None:
        super().before(resets)
        if self.trainer.global_step == 0 and self.trainer.training:
            self.all = [self.config, [self.config]]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.all[1][0].value *= 0.9


class GivesLayersAlone(Gives):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.layers[0].config.value *= 0.9


class Replaces(Gives):
    """Of what a layer and its part hold both, the step replaces one."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.config = layer.part.config

    def before(self, resets: bool) -> None:
        for layer in self.layers:
            layer.config = Scale()
            layer.config.value = 0.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count = round(100 * sum(layer.part.config.value for layer in self.layers))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "options"),
    pairs([Gives, GivesInAList, GivesLayersAlone, Replaces], [{"micro_batches": 2}, {"micro_batches": 2, "stages": 4}]),
)
def test_an_object_that_the_step_gives_to_all_is_one_object_for_hooks(
    model: type[Model], options: dict[str, Any]
) -> None:
    schedule = "interleaved" if "stages" in options else "1f1b"
    check(model, schedule=schedule, stream_evaluation=False, **options)
