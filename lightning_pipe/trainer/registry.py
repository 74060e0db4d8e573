"""The names under which a Trainer finds the strategies: "pipe", and "pipe_" with the name of each schedule."""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import Any

import wrapt

from lightning_pipe import schedules
from lightning_pipe.distributions import renamed
from lightning_pipe.schedules.registry import ALIASES


def install() -> None:
    """Register the names when lightning is imported, now or later; nothing heavy is imported for it."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        wrapt.register_post_import_hook(_register, f"{package}.strategies")


def strategy_names() -> dict[str, dict[str, Any]]:
    """Every name with the arguments that it stands for.

    Example:
        >>> strategy_names()["pipe_gpipe"]
        {'schedule': 'gpipe'}
    """
    # the Trainer looks names up in lower case
    known = (*schedules.names(), *ALIASES)
    return {"pipe": {}} | {f"pipe_{name.lower()}": {"schedule": name} for name in known}


def _create(second: bool, **arguments: Any) -> Any:
    # when a Trainer asks: `install` runs whenever this package is imported, which is to stay quick
    home = "lightning_pipe.trainer.strategy"
    return importlib.import_module(renamed(home) if second else home).PipeStrategy(**arguments)


def _register(module: ModuleType) -> None:
    second = module.__name__.startswith("pytorch_lightning.")
    for name, arguments in strategy_names().items():
        module.StrategyRegistry.register(
            name,
            partial(_create, second, **arguments),
            description=f"Pipeline parallelism, schedule {arguments.get('schedule', 'by default')}",
            override=True,
        )
