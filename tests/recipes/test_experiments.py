"""Every experiment under `debug=fast` on one device, from its configuration to the evaluation of what it leaves."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml

from recipes import checkpoints, job
from recipes.errors import RecipeError
from recipes.evaluate import evaluate, main, stored
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.recipe_curves import RECIPES, compose_recipe, write_data


@pytest.fixture(autouse=True)
def _quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*")
@pytest.mark.parametrize("recipe", slow_but(RECIPES, "resnet101_imagenet"))
def test_every_experiment_runs_and_can_be_evaluated(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    further = ["debug=fast", "pipe=none", "trainer.devices=1", "trainer.enable_progress_bar=false"]
    further += ["trainer.limit_test_batches=1", "tags=[first]"]
    settings = compose_recipe(recipe, write_data(tmp_path), tmp_path, further)
    report = job.run(settings)
    assert report.recipe == recipe
    assert json.loads((out / "summary.json").read_text())["tags"] == ["first"]
    told = yaml.unsafe_load((out / "hparams.yaml").read_text())  # of the logger
    assert told["config"]["optim"]["_target_"] == settings.optim._target_
    assert told["parameters"] > 1000
    translates = recipe == "nmt_multilingual"
    assert set(report.after) - set(report.before) == ({"test_bleu"} if translates else set())
    assert set(report.after) >= set(report.before) > {"val_loss"}
    log = (out / "metrics.csv").read_bytes()

    metrics = evaluate(out, "last", ["trainer.limit_test_batches=1"])
    for name, value in report.after.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    assert ("test_bleu" in metrics) == translates
    assert json.loads((out / "evaluation.json").read_text())["metrics"] == metrics
    assert (out / "metrics.csv").read_bytes() == log


@pytest.mark.filterwarnings("ignore")
def test_layers_are_compiled_one_by_one(tmp_path: Path) -> None:
    settings = compose_recipe("gpt2_wikitext2", {"text": "x"}, tmp_path, ["model.layers=2"])
    losses = []
    for compile in (None, "eager"):
        settings.compile = compile
        L.seed_everything(1, verbose=False)
        module = job.make_module(settings)
        module.log = lambda *args, **kwargs: None
        tokens = torch.arange(64).reshape(2, 32)
        losses.append(float(module.training_step({"input_ids": tokens, "labels": tokens}, 0)))
    assert [name for name, part in module.named_modules() if part._compiled_call_impl is not None] == [
        f"model.transformer.h.{number}" for number in range(2)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def evaluated(process: int, folder: Path) -> dict[str, float]:
    """The metrics of a run's last checkpoint, in two stages."""
    return evaluate(folder, "last", ["pipe=1f1b", "trainer=cpu", "trainer.limit_test_batches=1"])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["gpt2_wikitext2", "nmt_multilingual"])
def test_a_pipeline_evaluates_as_one_device(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    further = ["debug=fast", "pipe=none", "trainer.devices=1", "trainer.enable_progress_bar=false"]
    job.run(compose_recipe(recipe, write_data(tmp_path), tmp_path, further))
    alone = evaluate(tmp_path / "out", "last", ["trainer.limit_test_batches=1"])
    for metrics in run_trainers(evaluated, 2, timeout=200, folder=tmp_path / "out"):
        assert metrics == pytest.approx(alone, rel=1e-5)


def test_what_cannot_be_evaluated_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match=r"has no config\.yaml"):
        stored(tmp_path)
    settings = compose_recipe("gpt2_wikitext2", {"text": "x"}, tmp_path)
    from omegaconf import OmegaConf

    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(settings, resolve=True))
    assert stored(tmp_path, ["data.batch_size=3"]).data.batch_size == 3
    assert stored(tmp_path).pipe is None
    divided = stored(tmp_path, ["pipe=chimera", "trainer.devices=4", "data.batch_size=5"])
    assert (divided.pipe.layers, divided.trainer.devices, divided.data.batch_size) == ("model.transformer.h", 4, 5)
    with pytest.raises(RecipeError, match="Could not find 'pipe/2f2b'"):
        stored(tmp_path, ["pipe=2f2b"])
    with pytest.raises(RecipeError, match=r"no key model\.widht"):
        stored(tmp_path, ["model.widht=3"])
    with pytest.raises(RecipeError, match=r"no key trainer\.devcies"):
        stored(tmp_path, ["trainer.devcies=3"])
    with pytest.raises(SystemExit, match="has no best checkpoint"):
        main([str(tmp_path)])


def test_last_and_best_are_found_in_the_newest_run(tmp_path: Path) -> None:
    import os

    for age, name in enumerate(("new", "old")):
        folder = tmp_path / name / "checkpoints"
        folder.mkdir(parents=True)
        for file in ("step4.ckpt", "last.ckpt"):
            (folder / file).write_text("")
            os.utime(folder / file, (1000 - age, 1000 - age))
    (tmp_path / "empty").mkdir()
    run = tmp_path / "this"
    run.mkdir()
    assert checkpoints.to_resume(None, run) is None
    assert checkpoints.to_resume("last", run) == str(tmp_path / "new" / "checkpoints" / "last.ckpt")
    assert checkpoints.to_resume("best", run) == str(tmp_path / "new" / "checkpoints" / "step4.ckpt")
    path = str(tmp_path / "old" / "checkpoints" / "step4.ckpt")
    assert checkpoints.to_resume(path, run) == path
    with pytest.raises(RecipeError, match="There is no checkpoint nowhere"):
        checkpoints.to_resume("nowhere.ckpt", run)
    with pytest.raises(RecipeError, match="no earlier run"):
        checkpoints.to_resume("last", tmp_path / "empty" / "other")
