"""What the processes of the checkpoint tests run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from tests.support import oracle
from tests.support.lit_modules import Data, Lit, dataset
from tests.support.trainer_runs import QUIET, quiet

EPOCHS = 2


class Ordered(Data):
    """The same batches in every epoch, so that a break changes nothing."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(dataset(16), batch_size=8)


def run(
    devices: int | None,
    save: Path | None = None,
    resume: Path | None = None,
    averaged: bool = False,
    in_background: bool = False,
    **strategy: Any,
) -> oracle.Trace:
    """Train for `EPOCHS`, or what is left of them."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module = Lit().double()
    recorder = oracle.Recorder()
    calls: list[L.Callback] = [recorder]
    if save is not None:
        calls.append(callbacks.ModelCheckpoint(save, "{epoch}", monitor="val_loss", save_top_k=-1, save_last=True))
    if averaged:
        calls.append(callbacks.EMAWeightAveraging(decay=0.9))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy(**{"micro_batches": 1, **strategy}) if devices else "auto",
        callbacks=calls,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        plugins=[AsyncCheckpointIO()] if in_background else None,
        **{**QUIET, "num_sanity_val_steps": 0, "enable_checkpointing": save is not None},
    )
    trainer.fit(module, datamodule=Ordered(), ckpt_path=resume, weights_only=False if resume else None)
    recorder.trace.weights = oracle.state_of(module)
    recorder.trace.metrics = oracle.numbers(trainer.callback_metrics)
    if save is not None:
        trainer.save_checkpoint(save / "after.ckpt")
    return recorder.trace


def one(process: int, devices: int, **options: Any) -> oracle.Trace:
    """A run of one of several processes."""
    return run(devices, **options)


def of_four(folder: Path) -> dict[str, Any]:
    """Runs that save on four stages."""
    parts = {"save": folder / "parts", "schedule": "gpipe", "save_distributed_checkpoint": True}
    return {
        "saved": partial(one, devices=4, save=folder / "four", schedule="1f1b"),
        "saved_folder": partial(one, devices=4, **parts),
    }


def of_two(folder: Path) -> dict[str, Any]:
    """Runs that resume on two stages, and that keep averaged weights; a plugin of Lightning's writes those."""
    first = Path("epoch=0.ckpt")
    return {
        "two": partial(one, devices=2, resume=folder / "four" / first, schedule="gpipe"),
        "folder_two": partial(one, devices=2, resume=folder / "parts" / first, schedule="1f1b"),
        "averaged": partial(one, devices=2, save=folder / "averaged", averaged=True, in_background=True),
        "averaged_again": partial(one, devices=2, resume=folder / "averaged_plain" / first, averaged=True),
    }
