"""Files of checkpoints: ordinary ones, and how all of them come to their place when they are complete."""

from __future__ import annotations

import glob
import os
import pickle
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_pipe.errors import CheckpointError


def is_local(path: str | Path) -> bool:
    """Whether a path is one of this machine: others name a protocol, as ``s3://`` does."""
    return "://" not in str(path) or str(path).startswith("file://")


def is_ours(path: str | Path, io: CheckpointIO) -> bool:
    """Whether a file is one of Lightning's own on a local disk: others go through their plugin as they are."""
    return type(io) is TorchCheckpointIO and is_local(path)


def read(path: str, weights_only: bool | None) -> Any:
    """Read a file; it is mapped into memory where that is possible, so that only what is used is read.

    Raises:
        CheckpointError: it is none, or not a whole one.
    """
    try:
        # a file in torch's old format cannot be mapped
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, LookupError, ValueError) as error:
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        raise CheckpointError(
            f"{path} ({size:,} bytes) cannot be read as a checkpoint: {type(error).__name__}.",
            hint="It may be incomplete, or something else: resume from another checkpoint. One that holds objects of "
            "yours is read with weights_only=False, as the error above says.",
        ) from error


@contextmanager
def atomic_write(path: str, *, folder: bool = False) -> Iterator[str]:
    """Around the writing of a checkpoint: yields where, and puts it into its place if there was no error.

    What a run has left that was killed while it wrote this checkpoint is removed behind it.

    Args:
        path: the place. What is there stays until the new one is complete.
        folder: whether a folder is made, or a file.

    Raises:
        CheckpointError: it cannot be written there, or another run has written it meanwhile.
    """
    unfinished = _temp_path(path, f"{uuid.uuid4().hex}.part")
    try:
        os.makedirs(unfinished if folder else os.path.dirname(unfinished), exist_ok=True)
        yield unfinished
        _put(unfinished, path)
        for left in glob.glob(_temp_path(path, "*.part")):
            remove(left)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error.strerror or error}.",
            hint="Look for room and permissions there, and give each run a folder of its own: "
            "Trainer(default_root_dir=…), or ModelCheckpoint(dirpath=…).",
        ) from None
    finally:
        remove(unfinished)


def complete_path(path: str) -> str:
    """Where a checkpoint lies that was complete when the run was killed that was about to put another in its place."""
    old = _temp_path(path, "old")
    return old if not os.path.lexists(path) and os.path.lexists(old) else path


def _temp_path(path: str, suffix: str) -> str:
    """A name beside a checkpoint.

    Nothing of its own name is in it: Lightning (2.6) takes every file with "last" in its name for the last checkpoint.
    """
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".lightning-pipe-{zlib.crc32(name.encode()):08x}.{suffix}")


def _put(new: str, path: str) -> None:
    """Put a complete checkpoint into its place; what was there is removed."""
    os.stat(new)  # before anything is moved
    # The system replaces a file in one step, but no folder.
    if not os.path.isdir(new) and not os.path.isdir(path):
        os.replace(new, path)
        return
    old = _temp_path(path, "old")  # killed before the second step, `complete_path` finds the old one there
    if os.path.lexists(path):
        remove(old)
        os.rename(path, old)
    os.rename(new, path)
    remove(old)


def remove(path: str) -> None:
    """Remove a file, a link or a folder, if there is one."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.remove(path)
