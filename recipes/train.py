"""Trains a recipe: ``python -m recipes.train experiment=gpt2_wikitext2``."""

from __future__ import annotations

import logging
import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig

from recipes import config, processes
from recipes.errors import RecipeError, sentence

log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def train(settings: DictConfig) -> float:
    """One job; a sweep calls it once for each. Returns what is to be minimised."""
    try:
        return run(settings)
    except Exception as error:
        told = sentence(error)
        if HydraConfig.get().mode is RunMode.MULTIRUN:  # goes on, and its table tells which jobs have failed
            log.error("%s", told or "This job has failed.", exc_info=told is None)
            return float("nan")
        if told is None:
            raise
        sys.exit(told if processes.rank() == 0 or isinstance(error, RecipeError) else 1)


def run(settings: DictConfig) -> float:
    """Checks a configuration and trains what it describes."""
    config.require_experiment(settings)
    config.check(settings)
    from recipes import (
        console,
        job,
    )  # imports torch and the rest, which a mistake in the configuration need not wait for

    console.tidy()
    hydra_config = HydraConfig.get()
    with processes.job(hydra_config.overrides.task, hydra_config.runtime.output_dir, settings.threads) as current:
        report = job.run(settings, current)
    return report.after.get("val_loss", float("nan"))


def main() -> None:
    """Runs the command line; a mistake of the user's ends with a sentence, anything else with its traceback."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    config.register()
    processes.from_command_line()
    try:
        train()
    except (ConfigCompositionException, OverrideParseException) as error:
        sys.exit(str(config.explain(error)))


if __name__ == "__main__":
    main()
