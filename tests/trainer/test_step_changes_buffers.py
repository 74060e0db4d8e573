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


class Sets(Model):
    """By its own value, with another tensor in the place of the former one."""

    def before(self, batch: int) -> None:
        for layer in self.layers:
            layer.tau = layer.tau * 0.95


class SetsByBatch(Model):
    """The last micro-batch counts."""

    def step(self, x: Tensor, number: int) -> Tensor:
        for layer in self.layers:
            layer.tau = 1 + x.mean()
        return super().step(x, number)


class SetsByCounter(Model):
    count = 0

    def step(self, x: Tensor, number: int) -> Tensor:
        self.count += 1
        for layer in self.layers:
            layer.tau = torch.tensor(0.95**self.count)
        return super().step(x, number)


class SetsBehind(Model):
    def behind(self, batch: int) -> None:
        self.layers[0].tau = self.layers[0].tau * 0.95


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


INTERLEAVED = (2, {"micro_batches": 2, "stages": 4, "schedule": "interleaved"})
FOLDED: list[Any] = [
    (1, {"micro_batches": 2, "stages": 2}),
    (1, {"micro_batches": 2, "stages": 2, "schedule": "gpipe", "recompute": "always"}),
    (2, {"micro_batches": 4, "schedule": "dualpipev"}),
    (2, {**INTERLEAVED[1], "recompute": "always"}),
]
SCHEDULES = [(2, {"micro_batches": 2}), INTERLEAVED, *(pytest.param(*each, marks=pytest.mark.slow) for each in FOLDED)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Shrinks, ShrinksOne, Fills, Sets, SetsByBatch, LastBehind])
@pytest.mark.parametrize(("devices", "options"), SCHEDULES, ids=str)
def test_where_its_stage_runs_the_code_it_equals_one_device(
    model: type[Model], devices: int, options: dict[str, Any]
) -> None:
    check_training(model, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("devices", "options"), [(2, {"micro_batches": 2}), INTERLEAVED], ids=str)
def test_what_a_layer_is_given_by_its_own_changing_buffer_is_refused(devices: int, options: dict[str, Any]) -> None:
    """Ranks that do not have the layer have the buffer as it was."""
    with pytest.raises(CutError, match=r"'layers.0', call number 0 .* is given other values"):
        check_training(ShrinksReadEarly, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("devices", "options"), [FOLDED[0], INTERLEAVED], ids=str)
def test_changes_that_begin_late_equal_one_device(devices: int, options: dict[str, Any]) -> None:
    check_training(ShrinksLate, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("devices", "options"), [(2, {}), *SCHEDULES, (2, CHIMERA)], ids=str)
def test_behind_the_stage_of_its_layer_it_is_refused(devices: int, options: dict[str, Any]) -> None:
    with pytest.raises(CutError, match=r"'mul_' changes the buffer `self\.layers\.0\.tau` in place behind the layers"):
        check_training(FirstBehind, devices, **options)


@pytest.mark.timeout(60)
def test_a_buffer_set_behind_the_stage_that_has_it_is_refused() -> None:
    with pytest.raises(CutError, match=r"sets the buffer `self\.layers\.0\.tau` by its own value behind the layers"):
        check_training(SetsBehind)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("devices", "options"), [(2, {"micro_batches": 2}), INTERLEAVED], ids=str)
def test_a_buffer_set_by_what_other_micro_batches_have_left_is_refused(devices: int, options: dict[str, Any]) -> None:
    with pytest.raises(
        CutError, match=r"sets `self\.layers\.\d\.tau` to one value where the layer runs, and on the last"
    ):
        check_training(SetsByCounter, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Shrinks, ShrinksLate, Sets])
def test_of_several_pipes_none_has_the_value_before_a_micro_batch(model: type[Model]) -> None:
    with pytest.raises(CutError, match=r"the step changes `self\.layers\.\d\.tau` by its own value"):
        check_training(model, **CHIMERA)


@pytest.mark.timeout(60)
def test_with_several_pipes_what_is_alike_in_all_micro_batches_equals_one_device() -> None:
    check_training(Fills, **CHIMERA)


@pytest.mark.timeout(60)
def test_with_several_pipes_nobody_knows_what_the_last_micro_batch_has_set() -> None:
    with pytest.raises(
        CutError, match=r"the step changes `self\.layers\.\d\.tau`, and this schedule has several pipes"
    ):
        check_training(SetsByBatch, **CHIMERA)


def test_a_change_that_could_not_be_put_back_is_refused() -> None:
    with pytest.raises(CutError, match=r"changes the buffer `self\.layers\.1\.tau` by way of a tensor that shares"):
        check_training(ByItsData, 1, micro_batches=2, stages=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Shrinks, LastBehind])
@pytest.mark.parametrize(
    "options",
    [
        {},
        WAITS,
        {"stages": 4, "schedule": "interleaved"},
        pytest.param({"schedule": "chimera"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_evaluation_steps_change_equals_one_device(model: type[Model], options: dict[str, Any]) -> None:
    plain = evaluated(0, None, model)
    for values in run_trainers(evaluated, 2, timeout=40, devices=2, model=model, **options):
        assert values == pytest.approx(plain, rel=1e-9)
