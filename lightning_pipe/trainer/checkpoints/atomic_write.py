"""Checkpoints are written beside their place and put there when they are complete."""

from __future__ import annotations

import glob
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightning_pipe.errors import CheckpointError


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
