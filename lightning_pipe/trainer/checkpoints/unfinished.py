"""Checkpoints are written beside their place and put there when they are complete."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_pipe.errors import CheckpointError

_PREFIX, _SUFFIX = ".lightning-pipe-", ".part"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_PROBE = 1 << 20


def beside(path: str) -> str:
    """Where a checkpoint lies while it is written.

    Nothing of the name is in it: Lightning (2.6) takes every file with "last" in its name for the last checkpoint.
    """
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f"{_PREFIX}{zlib.crc32(name.encode()):08x}{_SUFFIX}")


@contextmanager
def replacing(path: str, *, folder: bool = False) -> Iterator[str]:
    """Around the writing of a checkpoint: yields where, and puts it into its place if there was no error.

    What other runs have left there that were killed is removed; a lock tells it from what others are writing.

    Args:
        path: the place. What is there stays until the new one is complete.
        folder: whether a folder is made, or a file.

    Raises:
        CheckpointError: it cannot be written there, or another run is writing it.
    """
    unfinished = beside(path)
    try:
        os.makedirs(os.path.dirname(unfinished), exist_ok=True)
        _sweep(os.path.dirname(unfinished))
        lock = _made(unfinished, folder=folder)
    except BlockingIOError:
        raise CheckpointError(
            f"The checkpoint {path} is being written by another run at this moment.",
            hint="Give each run a folder of its own: Trainer(default_root_dir=…), or ModelCheckpoint(dirpath=…).",
        ) from None
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be written: {error.strerror or error}.") from None
    try:
        yield unfinished
        exchange(unfinished, path)
    finally:
        remove(unfinished)
        os.close(lock)


def exchange(new: str, path: str) -> None:
    """Put a complete checkpoint into its place, in one step; what was there is removed."""
    # The system replaces a file in one step, but no folder that has something in it.
    if not os.path.isdir(new) and not os.path.isdir(path):
        os.replace(new, path)
    elif not os.path.lexists(path):
        os.rename(new, path)
    else:
        if not _exchanged(new, path):
            # not every file system can: killed in between, the new checkpoint lies beside its place; see `found`
            old = f"{new}.old"
            remove(old)
            os.rename(path, old)
            os.rename(new, path)
            remove(old)
        remove(new)


def found(path: str) -> str:
    """Where a checkpoint lies that was complete when the run was killed that was about to put it into its place."""
    old = f"{beside(path)}.old"
    return old if not os.path.lexists(path) and os.path.lexists(old) else path


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


def _made(unfinished: str, *, folder: bool) -> int:
    """Make the file or folder, and lock it; returns what holds the lock.

    Raises:
        BlockingIOError: another run is writing it, and holds the lock.
    """
    while True:
        try:
            os.mkdir(unfinished) if folder else Path(unfinished).touch(exist_ok=False)
        except FileExistsError:
            if _is_locked(unfinished):
                raise BlockingIOError from None
            remove(unfinished)
            continue
        lock = os.open(unfinished, os.O_RDONLY)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # another run may have swept it away, and made its own, before it was locked
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(unfinished)):
                return lock
        os.close(lock)


def _is_locked(unfinished: str) -> bool:
    """Whether another run is writing this."""
    with suppress(FileNotFoundError):
        lock = os.open(unfinished, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # not every file system has locks
            return False
        finally:
            os.close(lock)
    return False


def _sweep(folder: str) -> None:
    """Remove what runs have left that were killed while they wrote."""
    # The lock of a process goes with it, however it ends: what can be locked is nobody's any more.
    for entry in Path(folder).glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            lock = os.open(entry, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(entry))
            finally:
                os.close(lock)


def _exchanged(one: str, other: str) -> bool:
    """Exchange two names in one step, where the system can."""
    try:
        # Python (3.11) has no function for it, and not every C library has.
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
