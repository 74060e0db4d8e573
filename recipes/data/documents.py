"""Documents made of sentences: Wikipedia on the hub or in its dump, local files, or Python's standard library."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import load_dataset

from recipes.data import files, sources, wikipedia
from recipes.data.store import Texts
from recipes.errors import RecipeError

Document = list[str]
READERS = (".txt", ".jsonl", ".jsonl.gz", ".parquet", *wikipedia.DUMPS)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


Documents = Texts[Callable[[], Iterator[Document]]]
"""Each split is a function that begins reading anew, document by document."""


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

    splits = {split: partial(read, split) for split in files.SPLITS}
    return Documents(corpus.title, splits, corpus.fingerprint)


def local_files(folder: Path, documents: int | None = None) -> Documents:
    """Reads text, JSON lines and Parquet files, the last two by "text"; Wikipedia's dump and WikiExtractor's output.

    Args:
        folder: holds ``train*`` and ``valid*``; else one document of two hundred in all files is for validation. Files
            may be at any depth, as in a dump of Wikipedia. A single file will do.
        documents: stop after so many where files do not say what is for validation; None reads all.
    """
    every = [
        file
        for file in files.below(folder, ("",))
        if file.name.endswith(READERS) or wikipedia.EXTRACTED.fullmatch(file.name)
    ]
    if not every:
        raise RecipeError(
            f"{folder} has no file ending in {', '.join(READERS)}, and no wiki_00 of WikiExtractor.",
            hint="Name the folder that has them.",
        )
    named = files.by_split(folder, every)

    def whole() -> Iterator[Document]:
        return islice(_documents(every, cut=True), documents)

    splits: dict[str, Callable[[], Iterator[Document]]] = {
        split: partial(_documents, named[split], cut=False)
        if named
        else partial(files.share, whole, validation=split == "validation")
        for split in files.SPLITS
    }
    for split, read in splits.items():
        if next(read(), None) is None:
            raise RecipeError(f"The {split} split of {folder} is empty.", hint="Check the files' contents.")
    limit = "" if named or documents is None else f" {documents}"
    return Documents(f"the files in {folder}", splits, f"{files.fingerprint(every)}{limit}")


def _documents(places: Iterable[Path], *, cut: bool) -> Iterator[Document]:
    """The documents of all files; with ``cut``, the lines of text files are cut into sentences."""
    for file in places:
        if file.suffix == ".txt":
            for document in _paragraphs(file):
                yield sentences_of("\n".join(document)) if cut else document
            continue
        for text in _texts(file):
            if sentences := sentences_of(str(text or "")):
                yield sentences


def _texts(file: Path) -> Iterator[str | None]:
    if file.name.endswith(wikipedia.DUMPS):
        return wikipedia.articles(file)
    if wikipedia.EXTRACTED.fullmatch(file.name):
        return wikipedia.extracted(file)
    return files.parquet_texts(file) if file.suffix == ".parquet" else files.json_texts(file)


def _paragraphs(file: Path) -> Iterator[Document]:
    document: Document = []
    for line in files.lines(file):
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

    def rows() -> Iterator[dict[str, Any]]:
        return islice(load_dataset(name, configuration, split="train", streaming=True), documents)

    def read(split: str) -> Iterator[Document]:
        texts = (row["text"] for row in files.share(rows, validation=split == "validation"))
        return filter(None, map(sentences_of, texts))

    fingerprint = hashlib.sha256(f"{name} {configuration} {documents}".encode()).hexdigest()
    splits = {split: partial(read, split) for split in files.SPLITS}
    return Documents(f"{name} ({configuration}) from the hub", splits, fingerprint)


def sentences_of(text: str) -> Document:
    r"""Cuts a text at line breaks and at the ends of sentences.

    Example:
        >>> sentences_of("Rain fell. It was 3 p.m. in Paris.\n\nNobody came!")
        ['Rain fell.', 'It was 3 p.m. in Paris.', 'Nobody came!']
    """
    return [sentence.strip() for line in text.splitlines() for sentence in SENTENCE_END.split(line) if sentence.strip()]
