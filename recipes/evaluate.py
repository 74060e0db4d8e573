"""Evaluates what a run has trained: ``python -m recipes.evaluate FOLDER``, on one device or on a pipeline.

``pipe=1f1b trainer.devices=2`` evaluates in two stages, ``pipe=none``, which is the default, on one device.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_pipe.errors import PipeError
from recipes import checkpoints, command_line, config
from recipes.errors import RecipeError


def evaluate(folder: Path, which: str = "best", overrides: Sequence[str] = ()) -> dict[str, float]:
    """Validates a checkpoint of a run, and tests it where the recipe has a test.

    Args:
        folder: the run's.
        which: "best", "last", or the path of a checkpoint.
        overrides: changes of its configuration, such as ``trainer.limit_val_batches=10`` or ``pipe=1f1b``.

    Returns:
        the metrics, which are also left in the folder as ``evaluation.json``.
    """
    settings = stored(folder, overrides)
    checkpoint = checkpoints.in_run(folder, which)

    import lightning as L
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from recipes import job

    command_line.tidy()
    warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided.*")
    logging.getLogger("recipes").setLevel(logging.INFO)
    L.seed_everything(settings.seed, workers=True, verbose=False)
    module, data = job.make_module(settings), job.make_data(settings)
    trainer = job.make_trainer(settings, callbacks=[])
    with command_line.threads(settings.threads):
        metrics = dict(trainer.validate(module, datamodule=data, ckpt_path=str(checkpoint), verbose=False)[0])
        if is_overridden("test_step", module):
            metrics |= trainer.test(module, datamodule=data, ckpt_path=str(checkpoint), verbose=False)[0]
    if trainer.is_global_zero:
        result = {"checkpoint": str(checkpoint), "metrics": metrics}
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    return metrics


def stored(folder: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of a run, changed to one device without a pipeline unless the overrides ask for another.

    Args:
        folder: the run's.
        overrides: further changes.
    """
    path = folder / "config.yaml"
    if not path.exists():
        raise RecipeError(f"{folder} has no config.yaml.", hint="Name the output folder of a training run.")
    groups = [word for word in overrides if word.split("=", 1)[0] in ("pipe", "trainer")]
    others = [word for word in overrides if word not in groups]
    try:
        settings = OmegaConf.merge(OmegaConf.structured(config.Train), OmegaConf.load(path))
        # the run's own log must not be written over
        settings.update(logger={}, callbacks={}, pipe=None)
        settings.trainer.update(devices=1, num_nodes=1, enable_checkpointing=False)
        if groups:
            plain = [] if any(word.startswith("pipe=") for word in groups) else ["pipe=none"]
            chosen = config.composed([*plain, *groups])
            settings.pipe = chosen.pipe
            settings.trainer.update({key: chosen.trainer[key] for key in PLACES})
        settings.merge_with(OmegaConf.from_dotlist(others))
    except (OmegaConfBaseException, HydraException) as error:
        raise config.explain(error) from error
    assert isinstance(settings, DictConfig)
    config.check(settings)
    return settings


PLACES = ("accelerator", "devices", "num_nodes", "precision")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a mistake of the user's ends with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m recipes.evaluate", description=evaluate.__doc__)
    parser.add_argument("folder", type=Path, help="output folder of a training run")
    parser.add_argument("--checkpoint", default="best", help="best (the default), last, or the path of a file")
    logging.basicConfig(format="%(message)s")
    parser.add_argument("overrides", nargs="*", help="changes such as trainer.limit_val_batches=10")
    given = parser.parse_intermixed_args(arguments)  # changes may stand before and after --checkpoint
    try:
        metrics = evaluate(given.folder, given.checkpoint, given.overrides)
    except PipeError as error:
        sys.exit(str(error))
    for name, value in metrics.items() if command_line.rank() == 0 else ():
        print(f"{name:<24}{value:.6g}")


if __name__ == "__main__":
    main()
