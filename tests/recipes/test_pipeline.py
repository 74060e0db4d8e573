"""Every recipe's curve is the same under all schedules and on one plain device.

In fast tests one recipe trains so in one process, in tests/recipes/reproduce/test_ran_here.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_trainers
from tests.support.recipe_curves import BATCHES, RECIPES, Curve, break_off_and_resume, train, train_all, write_data

PIPES = ["gpipe", "1f1b", "chimera"]
# Batch norm sees a micro-batch at a time, of 16 samples: one device does too if it accumulates them.
MICRO_BATCHES, SAMPLES = 2, 16
ACCUMULATED = [
    f"data.batch_size={SAMPLES}",
    f"trainer.accumulate_grad_batches={MICRO_BATCHES}",
    f"trainer.limit_train_batches={MICRO_BATCHES * BATCHES}",
]
IN_MICRO_BATCHES = {"amoebanet_imagenet": ACCUMULATED, "resnet101_imagenet": ACCUMULATED}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_curve_does_not_depend_on_the_schedule(recipe: str, tmp_path: Path) -> None:
    data = write_data(tmp_path)
    plain = train(recipe, data, tmp_path, "pipe=none", "trainer.devices=1", *IN_MICRO_BATCHES.get(recipe, []))
    pipelines = run_trainers(train_all, 2, timeout=200, recipe=recipe, pipes=PIPES, data=data, folder=tmp_path)
    expected = merged(plain.losses)
    for curves in pipelines:
        for pipe in PIPES:
            assert curves[pipe].losses == pytest.approx(expected, rel=1e-6), pipe
            assert_same_metrics(recipe, curves[pipe], plain)


def merged(losses: list[float]) -> list[float]:
    """The mean losses of batches that were accumulated."""
    size = len(losses) // BATCHES
    return [sum(losses[start : start + size]) / size for start in range(0, len(losses), size)]


def assert_same_metrics(recipe: str, curve: Curve, plain: Curve) -> None:
    if recipe in IN_MICRO_BATCHES:  # the running statistics are those of whole batches in a pipeline
        return
    names = [name for name in plain.metrics if name.startswith("val_")]
    assert names
    for name in names:
        assert curve.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_broken_off_epoch_goes_on_with_another_schedule(recipe: str, tmp_path: Path) -> None:
    data = write_data(tmp_path)
    both = run_trainers(break_off_and_resume, 2, timeout=200, recipe=recipe, data=data, folder=tmp_path)
    for process, (whole, resumed) in enumerate(both):
        assert len(whole.losses) == 6
        assert whole.drawn == resumed.drawn == (process == 0)
        assert resumed.losses == pytest.approx(whole.losses[3:], rel=1e-6)
        assert resumed.metrics["val_loss"] == pytest.approx(whole.metrics["val_loss"], rel=1e-6)
