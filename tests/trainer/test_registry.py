"""Names that a Trainer finds, whichever package is imported first."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_pipe
from lightning_pipe import PipeStrategy, schedules
from lightning_pipe.schedules.registry import ALIASES
from lightning_pipe.trainer import registry
from tests.support.processes import PRELOAD, run_trainers


def test_one_name_per_schedule() -> None:
    for name in (*schedules.names(), *ALIASES):
        strategy = L.Trainer(accelerator="cpu", strategy=f"pipe_{name}", logger=False).strategy
        assert isinstance(strategy, PipeStrategy)
        assert strategy.family.name == schedules.get(name).name


def test_the_plain_name() -> None:
    assert isinstance(L.Trainer(accelerator="cpu", strategy="PIPE", logger=False).strategy, PipeStrategy)


def test_registering_twice_is_harmless() -> None:
    registry.install()
    assert "pipe" in StrategyRegistry


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lightning_pipe.nonsense  # type: ignore[attr-defined]
    assert "PipeStrategy" in dir(lightning_pipe)


def names(process: int) -> set[str]:
    return {name for name in ("pipe", "pipe_1f1b") if name in StrategyRegistry}


def test_names_are_there_when_lightning_came_first() -> None:
    assert PRELOAD.index("lightning.pytorch") < PRELOAD.index("lightning_pipe.trainer.strategy")
    assert run_trainers(names, 1) == [{"pipe", "pipe_1f1b"}]
