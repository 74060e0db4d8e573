"""Each update uses the hyperparameters of its own batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pipe.trainer.asynchronous.hyperparameters import Hyperparameters


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("lr", 0.1, 0.2),
        ("lr", torch.tensor(0.1), torch.tensor(0.2)),
        ("betas", (0.9, 0.9), (0.8, 0.9)),
        ("scales", np.ones(2), np.zeros(2)),
    ],
)
def test_a_step_sees_what_was_set_for_its_batch(key: str, first: Any, second: Any) -> None:
    one, settings = optimizer(), Hyperparameters()
    group = one.param_groups[0]
    for batch, value in enumerate((first, second)):
        group[key] = value
        settings.note(batch, one)
    for batch, value in enumerate((first, second)):
        with settings.of(batch, one):
            assert np.array_equal(group[key], value)
    assert group[key] is second


def test_what_changes_in_steps_is_left_alone() -> None:
    one, settings = optimizer(), Hyperparameters()
    group = one.param_groups[0]
    group["steps"] = 0
    settings.note(0, one)
    settings.note(1, one)
    for batch in range(2):
        with settings.of(batch, one):
            assert group["steps"] == batch
            group["steps"] += 1
    assert group["steps"] == 2


def test_what_hooks_set_around_steps_is_what_the_next_step_finds() -> None:
    one, settings = optimizer(), Hyperparameters()
    group = one.param_groups[0]
    settings.note(0, one)
    settings.note(1, one)
    with settings.of(0, one):
        group["lr"] *= 2
    group["lr"] = 0.7  # by a scheduler, for the next batch
    settings.note(2, one)
    with settings.of(1, one):
        assert group["lr"] == 0.2
        group["lr"] *= 2
    with settings.of(2, one):
        assert group["lr"] == 0.7


def test_a_step_may_fail() -> None:
    one, settings = optimizer(), Hyperparameters()
    settings.note(0, one)
    one.param_groups[0]["lr"] = 0.5
    settings.note(1, one)

    def fails() -> None:
        with settings.of(0, one):
            assert one.param_groups[0]["lr"] == 0.1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert one.param_groups[0]["lr"] == 0.5
