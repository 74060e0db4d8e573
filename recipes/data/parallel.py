"""Pairs of texts in several languages: OPUS-100 on the hub, or local files, two for each pair of languages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from datasets import load_dataset

from recipes.data import files
from recipes.data.store import Texts
from recipes.errors import RecipeError

ALL = "*-"  # begins what names all pairs to a language


class Pair(NamedTuple):
    """A text and its translation."""

    source: str
    target: str


Read = Callable[[], Iterator[Pair]]
Parallel = Texts[Mapping[str, Read]]
"""Each split has for every language a function that begins reading its pairs anew."""


def local_files(folder: Path, pairs: Sequence[str]) -> Parallel:
    """Reads Moses files: ``NAME.de-en.de`` beside ``NAME.de-en.en``, whose lines translate each other.

    Args:
        folder: holds ``train*`` and ``valid*``; else one pair of two hundred in all files is for validation. Files may
            be at any depth.
        pairs: such as "de-en": from German, to English; "*-en" are all to English that there are.
    """
    named = [one for pair in pairs for one in (_present(folder, pair[2:]) if pair.startswith(ALL) else [pair])]
    found = {pair: _files(folder, *languages(pair)) for pair in named}
    splits = {split: {pair: _read(folder, both, split) for pair, both in found.items()} for split in files.SPLITS}
    used = [file for both in found.values() for pair in both.items() for file in pair]
    return Parallel(f"the files in {folder}", splits, files.fingerprint(used))


def _present(folder: Path, target: str) -> list[str]:
    """All pairs of languages to one of them that the names of files speak of."""
    language = r"([a-z]{2,3}(?:_[A-Za-z]{2,4})?)"  # de, zh_cn, pt_BR
    pair = re.compile(rf"(?:.*[^A-Za-z_])?(?:{language}-{target}|{target}-{language})\.(\w+)")
    names = [found for file in files.below(folder, ("",)) if (found := pair.fullmatch(file.name))]
    if not (sources := {name[3] for name in names if name[3] in (name[1], name[2])}):
        raise RecipeError(f"{folder} has no pairs with {target}.", hint=f"Such as NAME.de-{target}.de beside it.")
    return [f"{source}-{target}" for source in sorted(sources)]


def _files(folder: Path, source: str, target: str) -> dict[Path, Path]:
    """The files of a pair of languages: for each with sources the one with their translations."""
    names = (f"{source}-{target}", f"{target}-{source}")
    every = [file for file in files.below(folder, (f".{source}",)) if file.stem.endswith(names)]
    found = {file: file.with_suffix(f".{target}") for file in every or [folder / f"train.{names[0]}.{source}"]}
    if missing := next((file for both in found.items() for file in both if not file.is_file()), None):
        raise RecipeError(f"There is no file {missing}.", hint="Pairs are two files of as many lines, as Moses has.")
    return found


def _read(folder: Path, both: Mapping[Path, Path], split: str) -> Read:
    named = files.by_split(folder, list(both))
    chosen = named[split] if named else list(both)

    def joined() -> Iterator[Pair]:
        for file in chosen:
            yield from _lines(file, both[file])

    return joined if named else partial(files.share, joined, validation=split == "validation")


def _lines(source: Path, target: Path) -> Iterator[Pair]:
    for one, other in zip_longest(files.lines(source), files.lines(target)):
        if one is None or other is None:
            raise RecipeError(
                f"{source} and {target} have different numbers of lines.",
                hint="They must have as many: every line is translated by the same one.",
            )
        if one.strip() and other.strip():
            yield Pair(one.strip(), other.strip())


def hub(name: str, pairs: Sequence[str]) -> Parallel:
    """Streams pairs from the Hugging Face hub.

    Args:
        name: data set on the hub with one configuration per pair and a column "translation".
        pairs: such as "de-en": from German, to English.
    """

    def read(split: str, pair: str) -> Iterator[Pair]:
        source, target = languages(pair)
        # OPUS orders the two by the alphabet
        configuration = "-".join(sorted((source, target)))
        for row in load_dataset(name, configuration, split=split, streaming=True):
            yield Pair(row["translation"][source], row["translation"][target])

    splits = {split: {pair: partial(read, split, pair) for pair in pairs} for split in files.SPLITS}
    fingerprint = hashlib.sha256(json.dumps([name, *pairs]).encode()).hexdigest()
    return Parallel(f"{name} ({', '.join(pairs)}) from the hub", splits, fingerprint)


def languages(pair: str) -> tuple[str, str]:
    """The two languages of a pair such as "de-en"."""
    if pair.startswith(ALL):
        told = f"data.pairs: {pair!r} are all pairs in local files."
        raise RecipeError(told, hint="Name the folder by data.files, or name the pairs.")
    source, dash, target = pair.partition("-")
    if not (source and dash and target) or "-" in target:
        raise RecipeError(f"data.pairs: {pair!r} is not a pair of languages.", hint="Write it as de-en.")
    return source, target
