"""What a run says about itself before it trains: to every logger, and on the screen."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import rich
from omegaconf import DictConfig, OmegaConf
from rich.syntax import Syntax

from lightning_pipe import PipeStrategy, plan

log = logging.getLogger(__name__)


def tell(config: DictConfig, module: L.LightningModule, trainer: L.Trainer) -> None:
    """Gives every logger the resolved configuration, the number of parameters, the schedule and the plan.

    Args:
        config: a checked configuration.
        module: with all of its layers.
        trainer: with its loggers.
    """
    given = facts(config, module, trainer)
    for logger in trainer.loggers:
        logger.log_hyperparams(given)
    if config.extras.print_config:
        rich.print(Syntax(OmegaConf.to_yaml(config, resolve=True), "yaml"))


def facts(config: DictConfig, module: L.LightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """What the loggers get; the configuration in a group of its own, for modules log hyper-parameters too."""
    told: dict[str, Any] = {
        "config": OmegaConf.to_container(config, resolve=True),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }
    strategy = trainer.strategy
    if isinstance(strategy, PipeStrategy):
        measured = config.pipe.balance in ("time", "memory")  # the run knows the costs, and the plan does not
        made = plan(
            module,
            strategy.pipeline_parallel_size,
            schedule=strategy.family,
            batch=config.data.batch_size,
            accumulation=config.trainer.accumulate_grad_batches,
            balance="parameters" if measured else plain(config.pipe.balance),
            **{name: plain(config.pipe[name]) for name in ("stages", "micro_batches", "layers")},
        )
        told |= {"schedule": made.schedule, "predicted_bubble": made.bubble} | ({} if measured else {"plan": str(made)})
    return told


def plain(value: Any) -> Any:
    """A value of the configuration without OmegaConf's containers.

    Args:
        value: of a key.
    """
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
