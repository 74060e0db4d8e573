"""Optimizers and learning rate schedules against the formulas of the papers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recipes.callbacks import MovingAverage
from recipes.learning_rate_schedules import (
    inverse_square_root,
    warmup_exponential,
    warmup_linear,
    warmup_milestones,
)
from recipes.optimizers import RMSPropTF


def rates(schedule: torch.optim.lr_scheduler.LambdaLR, steps: int) -> list[float]:
    return [schedule.lr_lambdas[0](step) for step in range(steps)]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=1.0)


def test_rmsprop_is_tensorflow_s() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, dtype=torch.float64))
    expected, squares, momentum = weight.detach().clone(), torch.ones(5).double(), torch.zeros(5).double()
    optimizer = RMSPropTF([weight], lr=0.015, decay=0.9, momentum=0.9, eps=1.0, weight_decay=4e-5)
    for _ in range(6):
        gradient = torch.randn(5, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        total = gradient + 4e-5 * expected
        squares = 0.9 * squares + 0.1 * total**2
        momentum = 0.9 * momentum + 0.015 * total / (squares + 1.0).sqrt()
        expected = expected - momentum
    assert torch.allclose(weight.detach(), expected, rtol=1e-12)


def test_rmsprop_passes_by_parameters_without_gradient() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = RMSPropTF(weights)
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert weights[1].eq(1).all()
    assert weights[1] not in optimizer.state


def test_amoebanet_s_schedule_rises_falls_and_stops_falling() -> None:
    made = rates(warmup_exponential(sgd(), steps=10_000, epochs=100), 10_000)
    assert made[0] == pytest.approx(1 / 300)
    assert made[298] < 1
    assert made[300] == pytest.approx(0.97)  # three epochs: one step down every 2.4
    assert made[2399] == pytest.approx(0.97**9)
    assert min(made) >= 1e-4
    assert rates(warmup_exponential(sgd(), steps=1000, epochs=1000, every=1, rate=0.5), 1000)[-1] == 1e-4


def test_resnet_s_schedule_steps_down_after_30_60_and_80_epochs() -> None:
    made = rates(warmup_milestones(sgd(), steps=9000, epochs=90), 9000)
    assert made[0] == pytest.approx(1 / 400)
    assert made[399] == made[2999] == 1
    assert [made[step] for step in (3000, 5999, 6000, 8000, 8999)] == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])


def test_bert_s_schedule_ends_at_nothing() -> None:
    made = rates(warmup_linear(sgd(), steps=1000, warmup=0.1), 1000)
    assert max(made) == made[99] == 1
    assert made[-1] == 0
    assert made[549] == pytest.approx(0.5)


def test_the_transformer_s_schedule_falls_with_the_root() -> None:
    made = rates(inverse_square_root(sgd(), steps=100_000, warmup=4000), 20_000)
    assert max(made) == made[3999] == 1
    assert made[15_999] == pytest.approx(0.5)
    short = rates(inverse_square_root(sgd(), steps=40, warmup=4000), 40)
    assert short.index(max(short)) == 9


def test_the_moving_average_begins_short() -> None:
    average = MovingAverage(decay=0.9)._kwargs["avg_fn"]
    old, new = torch.tensor(1.0), torch.tensor(0.0)
    assert average(old, new, 0) == pytest.approx(0.1)
    assert average(old, new, torch.tensor(8)) == pytest.approx(0.5)
    assert average(old, new, 1000) == pytest.approx(0.9)
    assert average(torch.tensor(3), torch.tensor(7), 5) == 7
