"""What a mistake is told with on the command line of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.schedules import get
from lightning_pipe.trainer.checks import check_asynchronous
from recipes.errors import RecipeError, sentence
from recipes.job import check_metric

Compose = Callable[..., DictConfig]


def checked(settings: DictConfig) -> None:
    """Checks a configuration of a schedule without a flush as its stages do, without starting them."""
    trainer = SimpleNamespace(precision_plugin=None, lr_scheduler_configs=[], **settings.trainer)
    stream = SimpleNamespace(stream=SimpleNamespace(micro_batches=1))
    pipeline = SimpleNamespace(asynchronous=stream, family=get("pipedream"), pipeline_members=(0, 1))
    check_asynchronous(trainer, pipeline, settings.pipe.micro_batches, sharded=False)  # type: ignore[arg-type]


def test_the_remedy_for_clipping_without_a_flush_can_be_followed(composed: Compose) -> None:
    command = ["experiment=gpt2_wikitext2", "pipe=pipedream"]
    with pytest.raises(ConfigurationError) as caught:
        checked(composed(*command))
    told = sentence(caught.value)
    assert told is not None
    *_, remedy = told.splitlines()
    assert remedy == "Here: trainer.gradient_clip_val=null, or trainer.gradient_clip_algorithm=value."
    for override in remedy.removeprefix("Here: ").rstrip(".").split(", or "):
        checked(composed(*command, override))


def test_a_metric_that_a_run_will_not_have_is_refused_before_it_trains() -> None:
    known = ["val_loss", "val_top1"]
    check_metric("val_top1", known, tested=False)
    check_metric("test_bleu", known, tested=True)
    check_metric("val_top1", [], tested=False)
    for name, tested in (("test_bleu", False), ("val_bleu", True)):
        with pytest.raises(RecipeError, match="There are val_loss, val_top1"):
            check_metric(name, known, tested=tested)
