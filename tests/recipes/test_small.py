"""Every experiment at `size=small` starts: two batches in two stages, on small data."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipes import job
from tests.recipes.test_plan import PARAMETERS
from tests.support.processes import run_trainers
from tests.support.recipe_curves import compose_recipe, write_data

# The layers are those of the size; samples are few and short, and no state of an optimizer is kept.
FEW = [
    "size=small",
    "debug=fast",
    "callbacks=none",
    "logger=none",
    "optim=sgd",
    "optim.momentum=0",
    "optim.nesterov=false",
    "trainer.devices=2",
    "trainer.precision=32-true",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "data.batch_size=2",
]
SHORT = ["data.tokenizer=null", "data.vocabulary=300"]
DATA = {
    "amoebanet_imagenet": ["data.source=digits", "data.image_size=64"],
    "resnet101_imagenet": ["data.source=digits", "data.image_size=64"],
    "unet_imagenet": ["data.source=digits", "data.image_size=64"],
    "bert48_wikipedia": ["data.files={documents}", "data.length=32", "data.vocabulary=300"],
    "gpt2_wikitext2": ["data.files={text}", "data.block_length=32", *SHORT],
    "gpt2_wikitext103": ["data.files={text}", "data.block_length=32", *SHORT],
    "transformer_wikitext103": ["data.files={text}", "data.block_length=32", "data.vocabulary=300"],
    "nmt_multilingual": ["data.files={pairs}", "data.pairs=[de-en,fr-en]", "data.vocabulary=300"],
}


def test_every_experiment_is_started_here() -> None:
    assert DATA.keys() == PARAMETERS.keys()


def start(process: int, recipe: str, data: dict[str, str], folder: Path) -> dict[str, float]:
    """Validates, trains and validates, and returns what validation says at the end."""
    settings = compose_recipe(recipe, data, folder, [*FEW, *(one.format(**data) for one in DATA[recipe])], tiny=False)
    return dict(job.run(settings).after)


@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", DATA)
def test_two_batches_of_size_small_train(recipe: str, tmp_path: Path) -> None:
    data = write_data(tmp_path)
    (tmp_path / "out").mkdir()
    first, second = run_trainers(start, 2, timeout=500, recipe=recipe, data=data, folder=tmp_path)
    assert first == second
    assert math.isfinite(first["val_loss"])
