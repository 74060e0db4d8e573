"""What the step changes in place in a buffer of a layer is what one device makes of it, or an error names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from tests.support.processes import run_trainers
from tests.trainer import test_step_changes_layers as changes
from tests.trainer.test_step_changes_layers import CHIMERA, WAITS, WIDTH, check_training, evaluated


class Layer(nn.Module):
    """Adds to what it computes by a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("tau", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.tau * x.detach().mean()


class Model(changes.Model):
    """Four such layers."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def step(self, x: Tensor, number: int) -> Tensor:
        self.before(number // self.parts)
        out = self.layers(x).pow(2).mean()
        self.behind(number // self.parts)
        return out

    def state(self) -> list[float]:
        return []


class Shrinks(Model):
    def before(self, batch: int) -> None:
        for layer in self.layers:
            layer.tau.mul_(0.95)


class ShrinksOne(Model):
    def before(self, batch: int) -> None:
        self.layers[1].tau *= 0.95


class ShrinksLate(Model):
    """Begins in a batch in which no run is looked at any more."""

    def before(self, batch: int) -> None:
        if batch > 1:
            for layer in self.layers:
                layer.tau.mul_(0.95)


class Fills(Model):
    """Does not depend on the value before."""

    def before(self, batch: int) -> None:
        for layer in self.layers:
            layer.tau.fill_(0.95**batch)


class ShrinksReadEarly(Shrinks):
    """The code before the layers reads what it has changed."""

    def step(self, x: Tensor, number: int) -> Tensor:
        return super().step(x * self.layers[0].tau.clone(), number)


class ByItsData(Model):
    def before(self, batch: int) -> None:
        self.layers[1].tau.data.mul_(0.95)


class LastBehind(Model):
    def behind(self, batch: int) -> None:
        self.layers[3].tau.mul_(0.95)


class FirstBehind(Model):
    def behind(self, batch: int) -> None:
        self.layers[0].tau.mul_(0.95)


FOLDED: list[tuple[int, dict[str, Any]]] = [
    (1, {"micro_batches": 2, "stages": 2}),
    (1, {"micro_batches": 2, "stages": 2, "schedule": "gpipe", "recompute": "always"}),
    (2, {"micro_batches": 4, "schedule": "dualpipev"}),
    (2, {"micro_batches": 2, "stages": 4, "schedule": "interleaved"}),
    (2, {"micro_batches": 2, "stages": 4, "schedule": "interleaved", "recompute": "always"}),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Shrinks, ShrinksOne, Fills, ShrinksReadEarly, LastBehind])
@pytest.mark.parametrize(("devices", "options"), [(2, {"micro_batches": 2}), *FOLDED], ids=str)
def test_where_its_stage_runs_the_code_it_equals_one_device(
    model: type[Model], devices: int, options: dict[str, Any]
) -> None:
    check_training(model, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("devices", "options"), [FOLDED[0], FOLDED[3]], ids=str)
def test_changes_that_begin_late_equal_one_device(devices: int, options: dict[str, Any]) -> None:
    check_training(ShrinksLate, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("devices", "options"), [(2, {}), (2, {"micro_batches": 2}), *FOLDED, (2, CHIMERA)], ids=str)
def test_behind_the_stage_of_its_layer_it_is_refused(devices: int, options: dict[str, Any]) -> None:
    with pytest.raises(CutError, match=r"'mul_' changes the buffer `self\.layers\.0\.tau` in place behind the layers"):
        check_training(FirstBehind, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Shrinks, ShrinksLate])
def test_of_several_pipes_none_has_the_value_before_a_micro_batch(model: type[Model]) -> None:
    with pytest.raises(CutError, match=r"the step changes `self\.layers\.\d\.tau` by its own value"):
        check_training(model, **CHIMERA)


@pytest.mark.timeout(60)
def test_with_several_pipes_what_does_not_depend_on_the_value_before_equals_one_device() -> None:
    check_training(Fills, **CHIMERA)


def test_a_change_that_could_not_be_put_back_is_refused() -> None:
    with pytest.raises(CutError, match=r"changes the buffer `self\.layers\.1\.tau` by way of a tensor that shares"):
        check_training(ByItsData, 1, **FOLDED[0][1])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Shrinks, LastBehind])
@pytest.mark.parametrize(
    "options", [{}, WAITS, {"stages": 4, "schedule": "interleaved"}, {"schedule": "chimera"}], ids=str
)
def test_what_evaluation_steps_change_equals_one_device(model: type[Model], options: dict[str, Any]) -> None:
    plain = evaluated(0, None, model)
    for values in run_trainers(evaluated, 2, timeout=40, devices=2, model=model, **options):
        assert values == pytest.approx(plain, rel=1e-9)
