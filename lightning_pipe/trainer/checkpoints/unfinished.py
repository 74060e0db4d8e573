"""Checkpoints are written beside their place and put there when they are complete."""

from __future__ import annotations

import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_pipe.errors import CheckpointError

_PROBE = 1 << 20


@contextmanager
def replacing(path: str, *, folder: bool = False) -> Iterator[str]:
    """Around the writing of a checkpoint: yields where, and puts it into its place if there was no error.

    What a run has left that was killed while it wrote this checkpoint is removed behind it.

    Args:
        path: the place. What is there stays until the new one is complete.
        folder: whether a folder is made, or a file.

    Raises:
        CheckpointError: it cannot be written there, or another run has written it meanwhile.
    """
    unfinished = f"{_beside(path)}-{uuid.uuid4().hex}.part"
    try:
        os.makedirs(os.path.dirname(unfinished), exist_ok=True)
        os.mkdir(unfinished) if folder else Path(unfinished).touch()
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be written: {error.strerror or error}.") from None
    try:
        yield unfinished
        _put(unfinished, path)
    except FileNotFoundError:
        if os.path.lexists(unfinished):
            raise
        raise CheckpointError(
            f"The checkpoint {path} was written by another run at the same time.",
            hint="Give each run a folder of its own: Trainer(default_root_dir=…), or ModelCheckpoint(dirpath=…).",
        ) from None
    finally:
        remove(unfinished)
    for left in Path(_beside(path)).parent.glob(f"{os.path.basename(_beside(path))}-*.part"):
        remove(str(left))


def found(path: str) -> str:
    """Where a checkpoint lies that was complete when the run was killed that was about to put another in its place."""
    old = f"{_beside(path)}.old"
    return old if not os.path.lexists(path) and os.path.lexists(old) else path


def _beside(path: str) -> str:
    """How the names begin of what lies beside a checkpoint.

    Nothing of its own name is in it: Lightning (2.6) takes every file with "last" in its name for the last checkpoint.
    """
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".lightning-pipe-{zlib.crc32(name.encode()):08x}")


def _put(new: str, path: str) -> None:
    """Put a complete checkpoint into its place; what was there is removed."""
    os.stat(new)  # before anything is moved
    # The system replaces a file in one step, but no folder.
    if not os.path.isdir(new) and not os.path.isdir(path):
        os.replace(new, path)
        return
    old = f"{_beside(path)}.old"  # killed before the second step, the old checkpoint is `found` there
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
        with suppress(FileNotFoundError):
            os.remove(path)


@contextmanager
def naming(path: str, unfinished: str) -> Iterator[None]:
    """Around the writing of a file: errors name the checkpoint, and what the system says rather than torch.

    Args:
        path: the checkpoint.
        unfinished: what is written.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"The checkpoint {path} could not be written: {reason(error, unfinished)}.") from None


def reason(error: BaseException, unfinished: str) -> str:
    """Why something could not be written: torch (2.13) tells positions in the file, not what the system has said."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if isinstance(error, OSError) or not isinstance(error, RuntimeError):
        return text
    probe = f"{unfinished}.probe"
    try:
        with open(probe, "wb", buffering=0) as file:
            while file.tell() < _PROBE:
                file.write(bytes(_PROBE))
    except OSError as found_error:
        free = shutil.disk_usage(os.path.dirname(probe)).free
        return f"{found_error.strerror} ({free:,} bytes are free there)"
    finally:
        remove(probe)
    return text
