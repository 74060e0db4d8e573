"""Where text comes from: WikiText on the hub, WikiText in local files, or Python's own standard library."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from datasets import Dataset as Rows
from datasets import load_dataset

from recipes.data import files
from recipes.data.store import Texts
from recipes.errors import RecipeError

# Left out of the standard library's text: what is not part of every installation, and what is mostly tables.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
VALIDATION_SHARE = 0.1
FORMATS = (".parquet", ".txt", ".raw", ".tokens")


Corpus = Texts[Rows]
"""Each split has rows of one column, "text"."""


def standard_library(folder: Path | None = None) -> Corpus:
    """Reads the sources of the installed Python's standard library: real text that every machine has.

    A file belongs to the validation split by a hash of its name, so the split is the same on every machine.

    Args:
        folder: where to look; the running interpreter's own standard library by default.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, list[str]] = {"train": [], "validation": []}
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(name.parts[:-1]):
            continue
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # a handful of files declare another encoding
            continue
        digest.update(name.as_posix().encode() + content)
        texts[_split_of(name.as_posix())].append(text)
    count = sum(map(len, texts.values()))
    if not texts["train"] or not texts["validation"]:
        raise RecipeError(
            f"{root} has {count} Python sources; both splits need at least one.",
            hint="Name local text with data.source=files data.files=FOLDER.",
        )
    size = sum(len(text) for split in texts.values() for text in split) / 1e6
    title = f"the standard library of Python {platform.python_version()} ({count} source files, {size:.1f} MB)"
    splits = {name: Rows.from_dict({"text": rows}) for name, rows in texts.items()}
    return Corpus(title, splits, digest.hexdigest(), documents=True)


def _split_of(name: str) -> str:
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return "validation" if draw < VALIDATION_SHARE else "train"


def local_files(folder: Path) -> Corpus:
    """Reads a data set in WikiText's format: parquet files of the hub, or the text files of the original archive.

    Args:
        folder: holds ``train*`` and ``valid*`` or ``wiki.train.*`` and ``wiki.valid.*``, as ``.parquet`` (a column
            "text"), ``.txt``, ``.raw`` or ``.tokens``.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}.", hint="data.files names the folder that holds the text.")
    every = sorted(path for path in folder.iterdir() if path.suffix in FORMATS)
    named = files.by_split(folder, every)
    if not named:
        raise RecipeError(
            f"{folder} has no train* and valid* ending in {', '.join(FORMATS)}.",
            hint="Both splits are needed: train* and valid* (wiki.train.raw and wiki.valid.raw will do).",
        )
    every = [path for paths in named.values() for path in paths]
    formats = {path.suffix == ".parquet" for path in every}
    if len(formats) > 1:
        raise RecipeError(f"{folder} mixes parquet and text files.", hint="Keep one format in the folder.")
    names = {split: list(map(str, paths)) for split, paths in named.items()}
    if formats == {True}:
        splits = load_dataset("parquet", data_files=names)
    else:
        splits = load_dataset("text", data_files=names, keep_linebreaks=True)
    return Corpus(f"the files in {folder}", _text_only(splits, str(folder)), files.fingerprint(every))


def hub(name: str, configuration: str) -> Corpus:
    """Downloads a data set from the Hugging Face hub, or takes it from the hub's cache on this machine."""
    splits = load_dataset(name, configuration)
    fingerprint = "".join(splits[split]._fingerprint for split in ("train", "validation"))
    return Corpus(f"{name} ({configuration}) from the hub", _text_only(splits, name), fingerprint)


def _text_only(splits: Mapping[str, Rows], origin: str) -> dict[str, Rows]:
    for split in ("train", "validation"):
        if "text" not in splits[split].column_names:
            raise RecipeError(
                f"The {split} split of {origin} has the columns {splits[split].column_names}; 'text' is needed.",
                hint="Rename the column that holds the text.",
            )
        if not any(row and row.strip() for row in splits[split]["text"]):
            raise RecipeError(f"The {split} split of {origin} is empty.", hint="Check the files' contents.")
    return {split: splits[split].select_columns(["text"]) for split in ("train", "validation")}
