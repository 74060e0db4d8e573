"""Pairs of texts in local files: Moses pairs, archives of OPUS, tables, JSON lines."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from recipes.data import files
from recipes.errors import RecipeError

SPLITS = {"train": "train", "validation": "valid"}
KINDS = "Moses files (NAME.de-en.de beside NAME.de-en.en), archives of OPUS (.zip), .tsv, .jsonl"


class Pair(NamedTuple):
    """A text and its translation."""

    source: str
    target: str


Read = Callable[[], Iterator[Pair]]


class Found(NamedTuple):
    """The pairs of two languages, by split, and the files that they come from."""

    splits: dict[str, Read]
    files: list[Path]


def find(folder: Path, source: str, target: str) -> Found:
    """Looks for pairs of two languages.

    Args:
        folder: ``train.de-en.de`` and its like are the splits; else one pair of two hundred is for validation.
        source: the language to translate from.
        target: and to.
    """
    named = _named(folder, source, target)
    if named is not None:
        return named
    every: list[Read] = []
    used: list[Path] = []
    for file in files.below(folder, (f".{source}", ".zip", ".tsv", ".jsonl")):
        if read := _reader(file, source, target):
            every.append(read)
            used.append(file)
            used += [file.with_suffix(f".{target}")] if file.suffix == f".{source}" else []
    if not every:
        first = folder / f"train.{source}-{target}.{source}"
        raise RecipeError(f"There is no file {first}.", hint=f"Pairs of languages may come in {KINDS}.")

    def joined() -> Iterator[Pair]:
        for read in every:
            yield from read()

    return Found({split: partial(files.share, joined, validation=split == "validation") for split in SPLITS}, used)


def present(folder: Path, target: str) -> list[str]:
    """All pairs of languages to one of them that the names of files, also in archives of OPUS, speak of.

    Args:
        folder: holds the files.
        target: the language to translate to.
    """
    names = [path.name for path in sorted(folder.rglob("*")) if path.is_file()]
    for archive in sorted(folder.rglob("*.zip")):
        with files.reading(archive):
            names += zipfile.ZipFile(archive).namelist()
    language = r"([a-z]{2,3}(?:_[A-Za-z]{2,4})?)"  # de, zh_cn, pt_BR
    pair = re.compile(rf"(?<![A-Za-z_])(?:{language}-{target}|{target}-{language})(?![A-Za-z_])")
    pairs = [(name, one or other) for name in names for one, other in pair.findall(name)]
    found = {one for name, one in pairs if name.endswith((f".{one}", f".{target}", ".zip", ".tsv", ".jsonl"))}
    if not found:
        raise RecipeError(f"{folder} has no pairs with {target}.", hint=f"Pairs of languages may come in {KINDS}.")
    return [f"{source}-{target}" for source in sorted(found)]


def _named(folder: Path, source: str, target: str) -> Found | None:
    """Files with the names of splits: ``train.de-en.de`` beside ``train.de-en.en``, and ``valid.*``."""
    pair = f"{source}-{target}"
    places = {name: [folder / f"{start}.{pair}.{one}" for one in (source, target)] for name, start in SPLITS.items()}
    every = [file for both in places.values() for file in both]
    if not any(file.is_file() for file in every):
        return None
    for split, both in places.items():
        for file in both:
            if not file.is_file():
                raise RecipeError(f"There is no file {file}.", hint=f"{pair} needs it for the {split} split.")
        _check_lengths(*both, split=split, pair=pair)
    return Found({split: partial(_moses, *both) for split, both in places.items()}, every)


def _check_lengths(source: Path, target: Path, *, split: str, pair: str) -> None:
    counts = [sum(1 for _ in file.open("rb")) for file in (source, target)]
    if not any(counts):
        raise RecipeError(f"{source} is empty.", hint=f"The {split} split needs pairs of {pair}.")
    if counts[0] != counts[1]:
        raise RecipeError(
            f"{source} has {counts[0]} lines and {target} has {counts[1]}.",
            hint="They must have as many: every line is translated by the same one.",
        )


def _reader(file: Path, source: str, target: str) -> Read | None:
    """What reads a file, if it has pairs of these languages."""
    languages = (source, target)
    names = tuple("-".join(order) for order in (languages, languages[::-1]))
    if file.suffix == f".{source}":
        other = file.with_suffix(f".{target}")
        if not other.is_file() or not file.stem.endswith(names):
            return None
        _check_lengths(file, other, split="train", pair=names[0])
        return partial(_moses, file, other)
    if file.suffix == ".zip":
        return partial(_archive, file, source, target) if _members(file, source, target) else None
    if not any(name in file.stem for name in names):
        return None
    if file.suffix == ".tsv":
        return partial(_table, file, swapped=names[0] not in file.stem)
    return partial(_objects, file, source, target)


def _moses(source: Path, target: Path) -> Iterator[Pair]:
    with source.open(encoding="utf-8") as sources, target.open(encoding="utf-8") as targets:
        yield from _whole(zip(sources, targets, strict=True))


def _whole(rows: Iterator[tuple[str, str]]) -> Iterator[Pair]:
    return (Pair(one.strip(), other.strip()) for one, other in rows if one.strip() and other.strip())


def _members(file: Path, source: str, target: str) -> tuple[str, str] | None:
    """The two texts in an archive of OPUS."""
    names = zipfile.ZipFile(file).namelist()
    for name in names:
        stem = name.removesuffix(f".{source}")
        if stem != name and stem.endswith((f"{source}-{target}", f"{target}-{source}")) and f"{stem}.{target}" in names:
            return name, f"{stem}.{target}"
    return None


def _archive(file: Path, source: str, target: str) -> Iterator[Pair]:
    members = _members(file, source, target)
    assert members is not None
    with zipfile.ZipFile(file) as archive, archive.open(members[0]) as one, archive.open(members[1]) as other:
        texts = (io.TextIOWrapper(binary, encoding="utf-8") for binary in (one, other))
        yield from _whole(zip(*texts, strict=True))


def _table(file: Path, *, swapped: bool) -> Iterator[Pair]:
    for number, line in enumerate(files.lines(file), 1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise RecipeError(f"Line {number} of {file} has one column.", hint="A text, a tab, its translation.")
        one, other = (columns[1], columns[0]) if swapped else (columns[0], columns[1])
        yield from _whole(iter([(one, other)]))


def _objects(file: Path, source: str, target: str) -> Iterator[Pair]:
    for row in files.json_rows(file):
        texts = row.get("translation", row)
        if source not in texts or target not in texts:
            raise RecipeError(
                f"An object in {file} has the keys {', '.join(texts)}; {source} and {target} are needed.",
                hint=f'Such as {{"{source}": "…", "{target}": "…"}}.',
            )
        yield from _whole(iter([(texts[source], texts[target])]))
