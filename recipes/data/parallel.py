"""Pairs of texts in several languages: OPUS-100 on the hub, local files, or a stand-in that the machine has."""

from __future__ import annotations

import ast
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from datasets import load_dataset

from recipes.data import catalogues, files, parallel_files, sources
from recipes.data.parallel_files import Pair, Read
from recipes.data.store import Texts
from recipes.errors import RecipeError

ALL = "*-"  # begins what names all pairs to a language
STAND_INS = {
    "catalogues": "messages of this machine's programs and their translations",
    "docstrings": "definitions and docstrings of Python's standard library",
}
LONGEST_SOURCE = 400  # characters of a definition: its beginning says most about it
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


Parallel = Texts[Mapping[str, Read]]
"""Each split has for every language a function that begins reading its pairs anew."""


def docstrings(folder: Path | None = None) -> Parallel:
    """Reads definitions of Python's standard library and the first sentence of their docstrings.

    There are three "languages" to translate from: functions, methods and classes.

    Args:
        folder: where to look; the running interpreter's own standard library by default.
    """
    corpus = sources.standard_library(folder)
    found = {split: list(_definitions(corpus.splits[split]["text"])) for split in ("train", "validation")}

    def read(split: str, kind: str) -> Iterator[Pair]:
        return (pair for name, pair in found[split] if name == kind)

    kinds = ("class", "function", "method")
    splits = {split: {kind: partial(read, split, kind) for kind in kinds} for split in found}
    title = f"definitions and docstrings in {corpus.title}"
    return Parallel(title, splits, f"{corpus.fingerprint} {LONGEST_SOURCE}")


def _definitions(texts: Sequence[str]) -> Iterator[tuple[str, Pair]]:
    for text in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences in old sources
                tree = ast.parse(text)
        except SyntaxError:
            continue
        yield from _inside(tree, within_class=False)


def _inside(parent: ast.AST, *, within_class: bool) -> Iterator[tuple[str, Pair]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            is_class = isinstance(node, ast.ClassDef)
            if (text := ast.get_docstring(node)) and (pair := _pair(node, text)):
                yield "class" if is_class else "method" if within_class else "function", pair
            yield from _inside(node, within_class=is_class)
        elif not isinstance(node, ast.expr):
            yield from _inside(node, within_class=within_class)


def _pair(node: Definition, docstring: str) -> Pair | None:
    sentence = " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    node.body = node.body[1:] or [ast.Pass()]
    return Pair(ast.unparse(node)[:LONGEST_SOURCE], sentence) if sentence else None


def messages(pairs: Sequence[str]) -> Parallel:
    """Reads the message catalogues of this machine.

    Args:
        pairs: such as "de-en": from German, to English, which one of the two languages must be.
    """
    languages = {pair: _languages(pair) for pair in pairs}
    used = catalogues.files(list(languages.values()))
    splits = {
        split: {pair: partial(catalogues.read, both, split) for pair, both in languages.items()}
        for split in ("train", "validation")
    }
    title = f"messages of programs and their translations ({len(used)} catalogues)"
    settings = f"{catalogues.SHORTEST} {catalogues.LONGEST} {' '.join(pairs)}"
    return Parallel(title, splits, f"{files.fingerprint(used)} {settings}")


def stand_in(pairs: Sequence[str]) -> tuple[str, str]:
    """What takes the place of the published data on this machine: a source, and what it is, for the log.

    Args:
        pairs: such as "de-en".
    """
    name = "catalogues" if catalogues.enough([_languages(pair) for pair in pairs]) else "docstrings"
    return name, STAND_INS[name]


def local_files(folder: Path, pairs: Sequence[str]) -> Parallel:
    """Reads pairs in the formats of `recipes.data.parallel_files`.

    Args:
        folder: holds them.
        pairs: such as "de-en": from German, to English; "*-en" are all to English that there are.
    """
    named = [
        one for pair in pairs for one in (parallel_files.present(folder, pair[2:]) if pair.startswith(ALL) else [pair])
    ]
    found = {pair: parallel_files.find(folder, *_languages(pair)) for pair in named}
    splits = {split: {pair: one.splits[split] for pair, one in found.items()} for split in ("train", "validation")}
    used = [file for one in found.values() for file in one.files]
    return Parallel(f"the files in {folder}", splits, files.fingerprint(used))


def hub(name: str, pairs: Sequence[str]) -> Parallel:
    """Streams pairs from the Hugging Face hub.

    Args:
        name: data set on the hub with one configuration per pair and a column "translation".
        pairs: such as "de-en": from German, to English.
    """

    def read(split: str, pair: str) -> Iterator[Pair]:
        source, target = _languages(pair)
        # OPUS orders the two by the alphabet
        configuration = "-".join(sorted((source, target)))
        for row in load_dataset(name, configuration, split=split, streaming=True):
            yield Pair(row["translation"][source], row["translation"][target])

    splits = {split: {pair: partial(read, split, pair) for pair in pairs} for split in ("train", "validation")}
    fingerprint = hashlib.sha256(json.dumps([name, *pairs]).encode()).hexdigest()
    return Parallel(f"{name} ({', '.join(pairs)}) from the hub", splits, fingerprint)


def _languages(pair: str) -> tuple[str, str]:
    if pair.startswith(ALL):
        told = f"data.pairs: {pair!r} are all pairs in local files."
        raise RecipeError(told, hint="Name the folder by data.files, or name the pairs.")
    source, dash, target = pair.partition("-")
    if not (source and dash and target) or "-" in target:
        raise RecipeError(f"data.pairs: {pair!r} is not a pair of languages.", hint="Write it as de-en.")
    return source, target
