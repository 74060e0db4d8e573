"""Documents made of sentences: Wikipedia on the hub, local text files, or Python's standard library."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import load_dataset

from recipes.data import sources
from recipes.errors import RecipeError

Document = list[str]
HELD_OUT = 200  # one article of so many is for validation
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


@dataclass(frozen=True)
class Documents:
    """Documents in two splits.

    Args:
        title: what the text is, for the log: it must never pass for something else.
        splits: "train" and "validation": each a function that begins reading anew, document by document.
        fingerprint: changes whenever the text may have changed; part of the cache's name.
    """

    title: str
    splits: Mapping[str, Callable[[], Iterator[Document]]]
    fingerprint: str


def standard_library(folder: Path | None = None) -> Documents:
    """Python's standard library: every file is a document, every line with something in it a sentence.

    Args:
        folder: where to look; the running interpreter's own standard library by default.
    """
    corpus = sources.standard_library(folder)

    def read(split: str) -> Iterator[Document]:
        for text in corpus.splits[split]["text"]:
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                yield lines

    splits = {split: partial(read, split) for split in ("train", "validation")}
    return Documents(corpus.title, splits, corpus.fingerprint)


def local_files(folder: Path) -> Documents:
    """Reads text files with one sentence on a line and an empty line between documents.

    Args:
        folder: holds ``train*.txt`` and ``valid*.txt``.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}.", hint="data.files names the folder that holds the text.")
    digest = hashlib.sha256()
    splits = {}
    for split, prefix in (("train", "train"), ("validation", "valid")):
        files = sorted(folder.glob(f"{prefix}*.txt"))
        if not files:
            raise RecipeError(f"{folder} has no {prefix}*.txt.", hint="Both splits are needed: train*.txt, valid*.txt.")
        for file in files:
            with file.open("rb") as content:
                digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        splits[split] = partial(_paragraphs, files)
        if next(splits[split](), None) is None:
            raise RecipeError(f"The {split} split of {folder} is empty.", hint="Check the files' contents.")
    return Documents(f"the files in {folder}", splits, digest.hexdigest())


def _paragraphs(files: Iterable[Path]) -> Iterator[Document]:
    for file in files:
        document: Document = []
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    document.append(line.strip())
                elif document:
                    yield document
                    document = []
        if document:
            yield document


def hub(name: str, configuration: str, documents: int | None) -> Documents:
    """Streams articles from the Hugging Face hub; one of two hundred is kept for validation.

    Args:
        name: data set on the hub, with one split "train" and a column "text".
        configuration: its configuration there.
        documents: stop after so many; None reads all.
    """

    def read(validation: bool) -> Iterator[Document]:
        rows: Iterable[dict[str, Any]] = load_dataset(name, configuration, split="train", streaming=True)
        for index, row in enumerate(rows):
            if index == documents:
                return
            if (index % HELD_OUT == 0) == validation and (sentences := sentences_of(row["text"])):
                yield sentences

    fingerprint = hashlib.sha256(f"{name} {configuration} {documents}".encode()).hexdigest()
    splits = {"train": partial(read, False), "validation": partial(read, True)}
    return Documents(f"{name} ({configuration}) from the hub", splits, fingerprint)


def sentences_of(text: str) -> Document:
    r"""Cuts a text at line breaks and at the ends of sentences.

    Example:
        >>> sentences_of("Rain fell. It was 3 p.m. in Paris.\n\nNobody came!")
        ['Rain fell.', 'It was 3 p.m. in Paris.', 'Nobody came!']
    """
    return [sentence.strip() for line in text.splitlines() for sentence in SENTENCE_END.split(line) if sentence.strip()]


def read(source: str, files: str | None, name: str, configuration: str, documents: int | None = None) -> Documents:
    """Reads the documents from a source.

    Args:
        source: "hub", "files" or "standard_library".
        files: folder with local files.
        name: data set on the hub.
        configuration: its configuration there.
        documents: how many to take from the hub; None takes all.
    """
    if source == "files":
        if files is None:
            raise RecipeError("data.source=files needs a folder.", hint="Add data.files=FOLDER.")
        return local_files(Path(files).expanduser())
    if source == "hub":
        return hub(name, configuration, documents)
    if source == "standard_library":
        return standard_library()
    raise RecipeError(f"data.source={source} is unknown.", hint="Choose auto, hub, files or standard_library.")
