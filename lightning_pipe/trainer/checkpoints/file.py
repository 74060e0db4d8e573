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

_NOT_UNDERSTOOD = "compatible with your use case: WeightsUnpickler error:"
"""How torch (2.13) begins what it says of a file that holds no pickled structure, as a page of text does not."""


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
    except pickle.UnpicklingError as error:
        if _NOT_UNDERSTOOD in str(error) or "weights_only" not in str(error):
            raise _unreadable(path, error) from None
        error.add_note(f"The file is {path}.")
        raise
    except (RuntimeError, OSError, EOFError, LookupError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: BaseException) -> CheckpointError:
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    text = (str(error).rpartition(_NOT_UNDERSTOOD)[2].strip().splitlines() or [""])[0]
    return CheckpointError(
        f"{path} ({size:,} bytes) cannot be read as a checkpoint: {type(error).__name__}: {text}",
        hint="It may be incomplete, or something else. Resume from another checkpoint.",
    )
