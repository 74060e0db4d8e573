"""Local files: what they are called, what they hold, and whether they have changed."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar
from xml.etree.ElementTree import ParseError

from recipes.errors import RecipeError

HELD_OUT = 200  # one document or pair of so many is for validation where files do not say
SPLITS = {"train": "train", "validation": "valid"}  # what names of their files begin with
LARGE = 2**26  # bytes above which a file's time stands for its contents

T = TypeVar("T")


def place(given: str) -> Path:
    """A file or folder that the configuration names.

    Raises:
        RecipeError: there is none.
    """
    found = Path(given).expanduser()
    if not given.strip() or not found.exists():
        raise RecipeError(f"There is no folder {given!r}.", hint="data.files names a folder or a file that exists.")
    return found


def chosen(files: str | None, name: str) -> Path:
    """The local files: those that ``files`` names, else ``name`` where it is a folder."""
    if files is None and not Path(name).expanduser().is_dir():
        raise RecipeError("data.source=files needs a folder.", hint="Add data.files=FOLDER.")
    return place(name if files is None else files)


def below(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """The files with one of these suffixes, at any depth; a file itself if it is one."""
    every = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in every if path.name.endswith(tuple(suffixes))]


def by_split(folder: Path, every: Iterable[Path]) -> dict[str, list[Path]]:
    """Files that are named ``train*`` and ``valid*`` by their split; nothing where names do not say it.

    Raises:
        RecipeError: there are some for validation alone.
    """
    starts = {split: (start, f"wiki.{start}") for split, start in SPLITS.items()}  # WikiText's have "wiki." before
    found = {split: [file for file in every if file.name.startswith(start)] for split, start in starts.items()}
    if found["validation"] and not found["train"]:
        raise RecipeError(f"{folder} has no train*.", hint="Both splits are needed: train* and valid*, or neither.")
    return found if found["validation"] else {}


def fingerprint(files: Iterable[Path]) -> str:
    """Changes whenever one of the files does."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        status = file.stat()
        if status.st_size > LARGE:
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
            continue
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Names the file that cannot be read to its end, and says why.

    Args:
        file: that is read meanwhile.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{file} is not in UTF-8: {error.reason}.", hint="Convert it, or download it again."
        ) from error
    except (OSError, EOFError, zlib.error, tarfile.TarError, ParseError) as error:
        raise RecipeError(f"{file} ends too early or is broken: {error}.", hint="Download it again.") from error


def opened(file: Path) -> IO[bytes]:
    """A file without its compression by gzip or bzip2."""
    unpacked = {".gz": gzip.open, ".bz2": bz2.open}.get(file.suffix, open)
    return unpacked(file, "rb")  # type: ignore[operator, no-any-return]


def lines(file: Path) -> Iterator[str]:
    """The lines of a text file, which may be compressed, without their ends."""
    with reading(file), io.TextIOWrapper(opened(file), encoding="utf-8") as text:
        for line in text:
            yield line.rstrip("\n")


def json_texts(file: Path) -> Iterator[str]:
    """The "text" of the object on every line."""
    for number, line in enumerate(lines(file), 1):
        if line.strip():
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                told = f"Line {number} of {file} is no JSON object with a text: {error!r}."
                raise RecipeError(told, hint='One object on a line, such as {"text": "…"}.') from error


def parquet_texts(file: Path) -> Iterator[str | None]:
    """The column "text", read piece by piece."""
    from pyarrow.parquet import ParquetFile

    opened = ParquetFile(file)
    if "text" not in opened.schema_arrow.names:
        names = ", ".join(opened.schema_arrow.names)
        raise RecipeError(f"{file} has the columns {names}; 'text' is needed.", hint="Rename the column.")
    for batch in opened.iter_batches(columns=["text"]):
        yield from batch.column(0).to_pylist()


def share(read: Callable[[], Iterator[T]], *, validation: bool) -> Iterator[T]:
    """One of two hundred for validation, the others for training.

    Example:
        >>> numbers = lambda: iter(range(401))
        >>> list(share(numbers, validation=True)), len(list(share(numbers, validation=False)))
        ([0, 200, 400], 398)
    """
    return (one for index, one in enumerate(read()) if (index % HELD_OUT == 0) == validation)
