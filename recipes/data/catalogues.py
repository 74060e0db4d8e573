"""Pairs out of message catalogues: what a machine's programs say in English, and how it was translated.

Linux machines have such files for many programs and languages, so they are sentence pairs that need no network.
"""

from __future__ import annotations

import gettext
import hashlib
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from recipes.data import files
from recipes.data.parallel import Pair, Parallel, languages
from recipes.errors import RecipeError

ROOTS = tuple(dict.fromkeys(Path(place, "share", "locale") for place in ("/usr", "/usr/local", sys.prefix)))
ENGLISH = "en"  # the language that messages are written in
SHORTEST, LONGEST = 3, 150  # words and characters of a message that is a sentence to translate


def messages(pairs: Sequence[str]) -> Parallel:
    """Reads the message catalogues of this machine.

    A message belongs to a split by a hash of its English text: one that stands in several catalogues, or is translated
    into several languages, is never in both splits.

    Args:
        pairs: such as "de-en": from German, to English, which one of the two languages must be.
    """
    found = {pair: _catalogues(*languages(pair)) for pair in pairs}
    used = [file for each in found.values() for file in each]

    def read(pair: str, split: str) -> Iterator[Pair]:
        for english, translated in _messages(tuple(found[pair])):
            if _held_out(english) == (split == "validation"):
                yield Pair(translated, english) if pair.endswith(f"-{ENGLISH}") else Pair(english, translated)

    splits = {split: {pair: partial(read, pair, split) for pair in pairs} for split in files.SPLITS}
    title = f"messages of programs and their translations ({len(used)} catalogues)"
    return Parallel(title, splits, f"{files.fingerprint(used)} {SHORTEST} {LONGEST} {' '.join(pairs)}")


def _catalogues(source: str, target: str) -> list[Path]:
    """The catalogues of the language that is not English."""
    if ENGLISH not in (source, target):
        raise RecipeError(f"No catalogue translates {source} to {target}.", hint="data.pairs such as [de-en, fr-en].")
    language = source if target == ENGLISH else target
    return [file for root in ROOTS for file in files.below(root / language / "LC_MESSAGES", (".mo",))]


def _held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % files.HELD_OUT == 0


@cache
def _messages(catalogues: tuple[Path, ...]) -> list[tuple[str, str]]:
    """Every English sentence once, with its first translation."""
    found: dict[str, str] = {}
    for file in catalogues:
        for english, translated in _entries(file):
            if english != translated and len(english.split()) >= SHORTEST and len(english) <= LONGEST and translated:
                found.setdefault(english, translated)
    return list(found.items())


def _entries(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with file.open("rb") as binary:
            # the public interface looks up a message and lists none; the attribute is the same since Python 2
            entries = gettext.GNUTranslations(binary)._catalog  # type: ignore[attr-defined]
    except (OSError, ValueError, LookupError, struct.error):  # broken, or not in the encoding that it names
        return
    for key, translated in entries.items():
        message, number = key if isinstance(key, tuple) else (key, 0)  # the forms of a plural
        if number == 0:
            yield _one_line(message.rpartition("\x04")[2]), _one_line(translated)  # without its context


def _one_line(text: str) -> str:
    return " ".join(text.split())
