"""The names under which a Trainer finds the strategies: "pipe", and "pipe_" with the name of each schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import wrapt

from lightning_pipe import schedules
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.schedules.registry import ALIASES


def install() -> None:
    """Register the names when lightning is imported, now or later; nothing heavy is imported for it."""
    wrapt.register_post_import_hook(_register_in_lightning, "lightning.pytorch.strategies")
    wrapt.register_post_import_hook(_register_refusal, "pytorch_lightning.strategies")


def strategy_names() -> dict[str, dict[str, Any]]:
    """Every name with the arguments that it stands for.

    Example:
        >>> strategy_names()["pipe_gpipe"]
        {'schedule': 'gpipe'}
    """
    # the Trainer looks names up in lower case
    known = (*schedules.names(), *ALIASES)
    return {"pipe": {}} | {f"pipe_{name.lower()}": {"schedule": name} for name in known}


def _create(**arguments: Any) -> Any:
    # when a Trainer asks: `install` runs whenever this package is imported, which is to stay quick
    from lightning_pipe.trainer.strategy import PipeStrategy

    return PipeStrategy(**arguments)


def _register(module: ModuleType, create: Callable[..., Any]) -> None:
    for name, arguments in strategy_names().items():
        module.StrategyRegistry.register(
            name,
            partial(create, **arguments),
            description=f"Pipeline parallelism, schedule {arguments.get('schedule', 'by default')}",
            override=True,
        )


def _register_in_lightning(module: ModuleType) -> None:
    _register(module, _create)


def _register_refusal(module: ModuleType) -> None:
    _register(module, _refuse)


def _refuse(**arguments: Any) -> NoReturn:
    raise ConfigurationError(
        "The strategy 'pipe' belongs to lightning.Trainer; this is the Trainer of the package pytorch_lightning, which "
        "has classes of its own.",
        hint="Use `import lightning as L` and L.Trainer, L.LightningModule throughout.",
    )
