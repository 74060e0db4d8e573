"""One training run: validate, fit, validate again, test, report."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightning_pipe import deferred_init
from lightning_pipe.callbacks import PipelineTimeline
from lightning_pipe.partition import find_layers
from recipes import checkpoints
from recipes.callbacks import Throughput
from recipes.errors import RecipeError
from recipes.modules.trained import Trained
from recipes.provenance import commit
from recipes.report import Report

log = logging.getLogger(__name__)


def run(config: DictConfig) -> Report:
    """Trains what the configuration describes.

    Args:
        config: a checked configuration.
    """
    started = time.perf_counter()
    checkpoint = checkpoints.to_resume(config.ckpt_path, Path(config.paths.output))
    L.seed_everything(config.seed, workers=True, verbose=False)
    data = make_data(config)
    with deferred_init() if config.pipe is not None else nullcontext():  # each process makes its own layers alone
        module = make_module(config)
    if config.transfer:
        if checkpoint is None or not module.head:
            raise RecipeError("transfer=true needs a ckpt_path, and a model with a head of its own, as AmoebaNet has.")
        module.strict_loading = False  # what the checkpoint has of the head is left out
    callbacks = make_callbacks(config)
    trainer = make_trainer(config, callbacks)
    if trainer.is_global_zero:
        told = {
            "config": OmegaConf.to_container(config, resolve=True),  # a group of its own: modules log arguments, too
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
        }
        for logger in trainer.loggers:
            logger.log_hyperparams(told)
        Path(config.paths.output, "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))

    tested = config.test and is_overridden("test_step", module)
    before = trainer.validate(module, datamodule=data, ckpt_path=checkpoint, verbose=False)[0]
    check_metric(config.optimized_metric, list(before), tested=tested)
    trainer.fit(module, datamodule=data, ckpt_path=None if config.transfer else checkpoint)

    after = {name: float(trainer.callback_metrics[name]) for name in before if name in trainer.callback_metrics}
    if tested:
        after |= trainer.test(module, datamodule=data, verbose=False)[0]
    report = Report(
        recipe=config.recipe,
        output=config.paths.output,
        before=before,
        after=after,
        **_measured(callbacks),
        seconds=time.perf_counter() - started,
        commit=commit(),
        tags=list(config.tags),
    )
    if trainer.is_global_zero:
        report.write()
        log.info("%s", report)
    return report


def check_metric(name: str, known: Sequence[str], *, tested: bool) -> None:
    """Refuses a metric that the run will not have, before it trains.

    Args:
        name: what the run is to return.
        known: the metrics of validation; nothing, where nothing is validated.
        tested: there will be a test, whose metrics are not known yet.
    """
    if known and name not in known and not (tested and name.startswith("test_")):
        raise RecipeError(
            f"optimized_metric={name} is no metric of this run.", hint=f"There are {', '.join(sorted(known))}."
        )


def make_data(config: DictConfig) -> L.LightningDataModule:
    """Builds the data module."""
    return instantiate(config.data, _convert_="all")  # type: ignore[no-any-return]


def make_module(config: DictConfig) -> Trained:
    """Builds the LightningModule with what makes its optimizer and its schedule; compiles its layers if asked to."""
    # plain containers: what a module keeps as hyper-parameters goes into checkpoints
    module: Trained = instantiate(config.model, _convert_="all")
    module.make_optimizer = instantiate(config.optim, _convert_="all")
    module.make_scheduler = instantiate(config.scheduler, _convert_="all")
    if config.compile is not None:
        given: Any = OmegaConf.to_container(config, resolve=True)
        for _, layer in find_layers(module, given["layers"]):
            layer.compile(backend=config.compile)
    return module


def make_callbacks(config: DictConfig) -> list[L.Callback]:
    """Builds the callbacks; Lightning refuses a progress bar where bars are switched off."""
    # an experiment may set options of callbacks that callbacks=none has not
    made = [instantiate(callback) for callback in config.callbacks.values() if "_target_" in callback]
    return [one for one in made if config.trainer.enable_progress_bar or not isinstance(one, ProgressBar)]


def make_trainer(config: DictConfig, callbacks: list[L.Callback]) -> L.Trainer:
    """Builds the Trainer with its strategy and loggers."""
    return instantiate(  # type: ignore[no-any-return]
        config.trainer,
        strategy="auto" if config.pipe is None else instantiate(config.pipe, _convert_="all"),
        callbacks=callbacks,
        logger=[instantiate(logger) for logger in config.logger.values()],
        _convert_="all",
    )


def close_loggers() -> None:
    """Ends what Weights & Biases has begun: it would take the next job of a sweep for the same run."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def _measured(callbacks: list[L.Callback]) -> dict[str, float | None]:
    """What the callbacks have measured, as far as they are there."""
    speed = next((call.samples_per_second for call in callbacks if isinstance(call, Throughput)), None)
    timeline = next((call for call in callbacks if isinstance(call, PipelineTimeline)), None)
    if timeline is None or timeline.timeline is None or timeline.predicted is None:
        return {"samples_per_second": speed, "bubble": None, "predicted_bubble": None}
    return {
        "samples_per_second": speed,
        "bubble": float(timeline.timeline.bubble_ratio),
        "predicted_bubble": float(timeline.predicted.bubble_ratio),
    }
