"""Training curves of recipes, on one device and in the processes of a pipeline, from composed configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.callbacks import PipelineTimeline
from recipes import config, job
from tests.recipes.conftest import write_text
from tests.recipes.data.test_segment_pairs import write_documents
from tests.recipes.data.test_translation import write_pairs
from tests.support import oracle

BATCHES = 4
COMMON = [
    f"trainer.limit_train_batches={BATCHES}",
    "trainer.limit_val_batches=2",
    "trainer.val_check_interval=null",
    "trainer.max_epochs=1",
    "trainer.enable_progress_bar=false",
    "trainer.precision=64-true",
]
# Smaller still than size=tiny. In double precision, for batch norms of few samples enlarge any rounding.
RECIPES = {
    "amoebanet_imagenet": ["data.source=digits", "data.batch_size=32", "data.image_size=32"],
    "bert48_wikipedia": ["data.files={documents}", "data.batch_size=8", "model.width=32", "model.heads=2"],
    "gpt2_wikitext2": ["data.files={text}", "data.block_length=32", "data.batch_size=8", "model.width=36"],
    "gpt2_wikitext103": [
        "data.files={text}",
        "data.vocabulary=300",
        "data.block_length=32",
        "data.batch_size=8",
        "model.width=32",
    ],
    "transformer_wikitext103": [
        "data.files={text}",
        "data.vocabulary=300",
        "data.block_length=32",
        "data.batch_size=8",
    ],
    "resnet101_imagenet": ["data.source=digits", "data.batch_size=32", "model.blocks=[1,1,1,1]", "model.width=4"],
    "unet_imagenet": ["data.source=digits", "data.batch_size=16", "model.channels=8"],
    "nmt_multilingual": ["data.files={pairs}", "data.pairs=[de-en,fr-en]", "data.batch_size=8", "model.inner=64"],
}


@dataclass
class Curve:
    """What one run leaves behind.

    Args:
        losses: of every batch.
        metrics: of validation after training.
        drawn: whether there is a timeline of the second batch.
    """

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    drawn: bool = False


def write_data(folder: Path) -> dict[str, str]:
    """Small local files for every recipe that has such."""
    places = {
        "documents": write_documents(folder / "documents", train=40),
        "text": write_text(folder / "text", train=200, validation=60),
        "pairs": write_pairs(folder / "pairs", german=60, french=20),
    }
    return {name: str(place) for name, place in places.items()}


def compose_recipe(recipe: str, data: dict[str, str], folder: Path, further: Sequence[str] = ()) -> Any:
    """The composed configuration of a short run of a model that is smaller still than ``size=tiny``."""
    smaller = [one.format(**data) for one in RECIPES[recipe]]
    overrides = [f"experiment={recipe}", *COMMON, *smaller, *further]
    made = config.composed([*overrides, f"paths.data={folder / 'cache'}", f"paths.output={folder / 'out'}"])
    config.check(made)
    return made


def train(
    recipe: str, data: dict[str, str], folder: Path, *further: str, every: int = 0, checkpoint: Path | None = None
) -> Curve:
    """Trains for a few batches.

    Args:
        recipe: a name in `RECIPES`.
        data: from `write_data`.
        folder: for all that is written.
        further: overrides.
        every: write a checkpoint every so many batches.
        checkpoint: go on from there.
    """
    given = compose_recipe(recipe, data, folder, further)
    L.seed_everything(given.seed, verbose=False)
    recorder, timeline = oracle.Recorder(), PipelineTimeline(batch=1)
    average = [instantiate(one) for name, one in given.callbacks.items() if name == "average"]
    saving = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = job.make_trainer(given, [recorder, timeline, *average, *([saving] if every else [])])
    module = job.make_module(given).double()  # Lightning reads a checkpoint before it makes the module double
    trainer.fit(module, datamodule=job.make_data(given), ckpt_path=checkpoint)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Curve(recorder.trace.losses, metrics, drawn=timeline.timeline is not None)


def train_all(process: int, recipe: str, pipes: Sequence[str], data: dict[str, str], folder: Path) -> dict[str, Curve]:
    """Trains in the processes of a pipeline, with one schedule after the other."""
    return {pipe: train(recipe, data, folder, f"pipe={pipe}", "trainer.devices=2") for pipe in pipes}


def break_off_and_resume(process: int, recipe: str, data: dict[str, str], folder: Path) -> list[Curve]:
    """A whole epoch of six batches with one schedule, and its second half again with another one."""
    common = ["trainer.devices=2", "trainer.limit_train_batches=6"]
    whole = train(recipe, data, folder, "pipe=gpipe", *common, every=3)
    middle = folder / "checkpoints" / "step=3.ckpt"
    return [whole, train(recipe, data, folder, "pipe=chimera", *common, checkpoint=middle)]
