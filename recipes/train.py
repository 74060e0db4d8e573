"""Trains a recipe: ``python -m recipes.train experiment=gpt2_wikitext2``."""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, InstantiationException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_pipe.errors import PipeError
from recipes import config, processes
from recipes.errors import RecipeError


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def train(settings: DictConfig) -> float:
    """One job; a sweep calls it once for each. Returns what is to be minimised."""
    try:
        return run(settings)
    except Exception as error:
        told = sentence(error)
        if told is None or HydraConfig.get().mode is RunMode.MULTIRUN:  # there, the table tells which jobs have failed
            raise
        sys.exit(told if processes.rank() == 0 or isinstance(error, RecipeError) else 1)


def sentence(error: Exception) -> str | None:
    r"""What a user's mistake is told with; None for any other error.

    The mistake may have been found by another process, whose traceback is then the end of this one's error.

    Example:
        >>> sentence(RecipeError("There is no folder x.", hint="Name another."))
        'There is no folder x.\nHint: Name another.'
        >>> sentence(RuntimeError("Loading failed:\n…\nrecipes.errors.RecipeError: There is no folder x."))
        'There is no folder x.'
        >>> sentence(RuntimeError("out of memory")) is None
        True
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    # what parts of the configuration say of their arguments while they are built
    if isinstance(error, InstantiationException) and isinstance(
        error.__cause__, (PipeError, ValueError, MisconfigurationException)
    ):
        return str(error.__cause__)
    _, mark, told = str(error).rpartition("recipes.errors.RecipeError: ")
    return told if mark or isinstance(error, PipeError) else None


def run(settings: DictConfig) -> float:
    """Checks a configuration and trains what it describes."""
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
    except PipeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
