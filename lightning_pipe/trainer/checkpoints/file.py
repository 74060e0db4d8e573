"""Ordinary checkpoint files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_pipe.errors import CheckpointError
from lightning_pipe.lightning_internals import is_local_path
from lightning_pipe.trainer.checkpoints.atomic_write import atomic_write


def is_ours(path: str | Path, io: CheckpointIO) -> bool:
    """Whether a file is one of Lightning's own on a local disk: others go through their plugin as they are."""
    return type(io) is TorchCheckpointIO and is_local_path(path)


def write(checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO, storage_options: Any) -> None:
    """Let a plugin write a checkpoint; a local file of Lightning's own appears in its place when it is complete.

    Args:
        checkpoint: all of it.
        path: the file.
        io: the Trainer's plugin.
        storage_options: for the plugin.
    """
    if not is_ours(path, io):
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        return
    with atomic_write(os.fspath(path)) as unfinished:
        io.save_checkpoint(checkpoint, unfinished, storage_options=storage_options)


def read(path: str, weights_only: bool | None) -> Any:
    """Read a file; it is mapped into memory where that is possible, so that only what is used is read.

    Raises:
        CheckpointError: it is none, or not a whole one.
    """
    try:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        except (RuntimeError, pickle.UnpicklingError) as error:
            if "mmap" not in str(error):  # a file in torch's old format
                raise
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, LookupError, ValueError) as error:
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        raise CheckpointError(
            f"{path} ({size:,} bytes) cannot be read as a checkpoint: {type(error).__name__}.",
            hint="It may be incomplete, or something else: resume from another checkpoint. One that holds objects of "
            "yours is read with weights_only=False, as the error above says.",
        ) from error
