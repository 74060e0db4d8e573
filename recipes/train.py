"""Trains a recipe: ``python -m recipes.train experiment=gpt2_wikitext2``."""

from __future__ import annotations

import logging
import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from recipes import command_line, config
from recipes.errors import RecipeError, sentence

printed = logging.getLogger("recipes.printed")  # goes into the log file only


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def train(settings: DictConfig) -> float:
    """One job; a sweep calls it once for each. Returns `optimized_metric`, by default the validation loss."""
    try:
        return run(settings)
    except Exception as error:
        told = sentence(error)
        if told is None:
            printed.error("This run has failed.", exc_info=True)  # its traceback is on the screen already
            raise
        sys.exit(told if command_line.rank() == 0 or isinstance(error, RecipeError) else 1)


def check_sweep(settings: DictConfig) -> None:
    """Refuses Lightning's own launcher in a sweep: it gives each process the command line of all jobs (2.6).

    Args:
        settings: a checked configuration.
    """
    devices = settings.trainer.devices
    if devices not in (1, "auto", [0]) and not any(name in os.environ for name in command_line.RANK_VARIABLES):
        raise RecipeError(
            f"trainer.devices={devices} needs processes that the job of a sweep cannot start.",
            hint=f"Start the sweep by torchrun --standalone --nproc-per-node {devices} -m recipes.train -m …",
        )


def run(settings: DictConfig) -> float:
    """Checks a configuration and trains what it describes."""
    config.require_experiment(settings)
    config.check(settings)
    from recipes import job

    command_line.tidy()
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        check_sweep(settings)
    with command_line.threads(settings.threads):
        try:
            report = job.run(settings)
        finally:
            job.close_loggers()
    return report.after.get(settings.optimized_metric, float("nan"))


if __name__ == "__main__":
    command_line.run(train)
