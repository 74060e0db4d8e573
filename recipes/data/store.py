"""Sequences of different lengths on disk, and folders that are either complete or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Split = TypeVar("Split")
LAYOUT = 2  # of folders in the cache: those of another one are not opened


@dataclass(frozen=True)
class Texts(Generic[Split]):
    """Text from one source.

    Args:
        title: what the text is, for the log: it must never pass for something else.
        splits: "train" and "validation".
        fingerprint: changes whenever the text may have changed; part of the cache's name.
        documents: rows of text are documents of their own and get a separator; else they are lines of one running text.
    """

    title: str
    splits: Mapping[str, Split]
    fingerprint: str
    documents: bool = False


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Builds a folder beside its final place and moves it there when it is complete.

    Args:
        folder: the final place.

    Yields:
        the folder to fill. After an error it is removed; if another process was faster, its folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        yield temporary
        with contextlib.suppress(OSError):  # another run has just finished the same one
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def kept(cache: Path, text: Texts[Any], tokenise: Callable[..., None], *settings: Any) -> Path:
    """The folder with a tokenised text, made now or by an earlier run.

    Args:
        cache: has such folders.
        text: where its contents come from.
        tokenise: gets the text, the settings and an empty folder, which it fills.
        settings: what the contents depend on beside the text, as JSON can say it.
    """
    key = hashlib.sha256(json.dumps([LAYOUT, text.fingerprint, *settings]).encode()).hexdigest()[:16]
    folder = cache.expanduser() / key
    if not folder.exists():
        started = time.perf_counter()
        with building(folder) as place:
            tokenise(text, *settings, place)
        log.info("Tokenised %s in %.1f s, kept in %s.", text.title, time.perf_counter() - started, folder)
    return folder


class Sequences(Sequence[NDArray[np.integer]]):
    """Sequences of token numbers, read from disk when they are needed.

    Args:
        path: as `write_sequences` was told.
    """

    def __init__(self, path: Path) -> None:
        self.ends = np.load(path.with_suffix(".ends.npy"), mmap_mode="r")
        file = path.with_suffix(".tokens")
        self.tokens: NDArray[np.integer] = (
            np.memmap(file, dtype=np.uint32, mode="r") if file.stat().st_size else np.empty(0, np.uint32)
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> NDArray[np.integer]:  # type: ignore[override]
        start = self.ends[index - 1] if index else 0
        return self.tokens[start : self.ends[index]]

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Length of every sequence."""
        lengths: NDArray[np.integer] = np.diff(self.ends, prepend=0)
        return lengths


def write_sequences(path: Path, sequences: Iterable[Sequence[int]]) -> None:
    """Writes sequences one by one: they need not fit into memory.

    Args:
        path: without suffix.
        sequences: of token numbers.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_sequences(Path(folder, "text"), [[1, 2], [], [3]])
        ...     [sequence.tolist() for sequence in Sequences(Path(folder, "text"))]
        [[1, 2], [], [3]]
    """
    lengths = array("q")  # eight bytes each: there may be a hundred million
    with path.with_suffix(".tokens").open("wb") as file:
        for sequence in sequences:
            file.write(np.asarray(sequence, dtype=np.uint32).tobytes())
            lengths.append(len(sequence))
    np.save(
        path.with_suffix(".ends.npy"),
        np.cumsum(np.frombuffer(lengths, dtype=np.int64) if lengths else np.empty(0, np.int64)),
    )
