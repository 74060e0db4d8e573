"""Pairs out of message catalogues: what a machine's programs say in English, and how it was translated.

Linux machines have such files for many programs and languages, so they are sentence pairs that need no network.
"""

from __future__ import annotations

import gettext
import hashlib
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from recipes.data.files import HELD_OUT, below
from recipes.data.parallel_files import Pair
from recipes.errors import RecipeError

ROOTS = tuple(dict.fromkeys(Path(place, "share", "locale") for place in ("/usr", "/usr/local", sys.prefix)))
ENGLISH = "en"  # the language that messages are written in
SHORTEST, LONGEST = 3, 150  # words and characters of a message that is a sentence to translate
ENOUGH = 2**20  # bytes of catalogues in every language, about ten thousand messages


def places(language: str) -> list[Path]:
    """The catalogues of a language on this machine."""
    return [file for root in ROOTS for file in below(root / language / "LC_MESSAGES", (".mo",))]


def files(pairs: Sequence[tuple[str, str]]) -> list[Path]:
    """The catalogues that pairs of languages come from.

    Args:
        pairs: of languages, one of each English.
    """
    return [file for pair in pairs for file in places(_foreign(pair))]


def enough(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether this machine has catalogues of all these languages that a model can learn from."""
    if not all(ENGLISH in pair for pair in pairs):
        return False
    return all(sum(file.stat().st_size for file in places(_foreign(pair))) >= ENOUGH for pair in pairs)


def read(pair: tuple[str, str], split: str) -> Iterator[Pair]:
    """The messages of a pair of languages.

    A message belongs to a split by a hash of its English text: one that stands in several catalogues, or is translated
    into several languages, is never in both splits.

    Args:
        pair: the languages, one of them English.
        split: "train" or "validation".
    """
    for english, translated in _messages(tuple(places(_foreign(pair)))):
        if _held_out(english) == (split == "validation"):
            yield Pair(translated, english) if pair[1] == ENGLISH else Pair(english, translated)


def _foreign(pair: tuple[str, str]) -> str:
    if ENGLISH not in pair:
        raise RecipeError(f"No catalogue translates {pair[0]} to {pair[1]}.", hint="data.pairs such as [de-en, fr-en].")
    return pair[0] if pair[1] == ENGLISH else pair[1]


def _held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT == 0


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
