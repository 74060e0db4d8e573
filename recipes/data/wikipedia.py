"""Wikipedia as it is distributed: the XML dump, whose wikitext is cleaned, and what WikiExtractor makes of it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from recipes.data import files
from recipes.errors import RecipeError

DUMPS = (".xml", ".xml.bz2", ".xml.gz")
EXTRACTED = re.compile(r"wiki_\d+(\.bz2)?")  # WikiExtractor's names; .bz2 with its option -c

HIDDEN = "gallery|imagemap|math|chem|pre|ref|references|score|source|syntaxhighlight|timeline"
REMOVED = re.compile(rf"<!--.*?-->|<({HIDDEN})\b[^<>]*?(?:/>|>.*?</\1\s*>)", re.DOTALL | re.IGNORECASE)
TEMPLATE_OR_TABLE = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")  # without another one inside
LINK = re.compile(r"\[\[([^\[\]|]*)(?:\|([^\[\]]*))?\]\]")  # without another one inside
ELSEWHERE = re.compile(r"\w[\w -]*:\S")  # a file, a category, another language
ADDRESS = re.compile(r"\[(?:\w+:)?//[^\s\]]+\s*([^\[\]]*)\]")
MARKS = re.compile(r"</?[a-z][^<>]*>|'{2,}|__[A-Z]+__", re.IGNORECASE)
NO_PROSE = ("=", "*", "#", ":", ";", "|", "!", "{", "}")  # headings, lists, and what is left of tables


def articles(file: Path) -> Iterator[str]:
    """The articles of a dump as text, one after the other: neither redirections nor pages of other kinds.

    Args:
        file: ``…-pages-articles.xml.bz2`` and its like, packed or unpacked; it is never in memory as a whole.
    """
    with files.reading(file), files.opened(file) as binary:
        events = ElementTree.iterparse(binary, ("start", "end"))
        root = next(events)[1]
        if not root.tag.endswith("mediawiki"):
            raise RecipeError(f"{file} begins with <{root.tag}>, not as a dump of Wikipedia.", hint="Rename it.")
        for event, page in events:
            if event == "end" and page.tag.rpartition("}")[2] == "page":
                if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
                    yield cleaned(page.findtext("{*}revision/{*}text") or "")
                root.clear()


def cleaned(wikitext: str) -> str:
    r"""Prose out of wikitext.

    Comments, references, formulas, templates and tables go with all that is in them; links leave their words, those to
    files, categories and other languages nothing; headings and lists go.

    Example:
        >>> cleaned("== Head ==\n'''Rain''' is [[water|wet]].<ref>Who?</ref> {{Cite {{this}}}}It falls.\n* an item")
        'Rain is wet. It falls.'
    """
    text = REMOVED.sub("", wikitext)
    for inner, words in ((TEMPLATE_OR_TABLE, ""), (LINK, _words)):
        changed = 1
        while changed:
            text, changed = inner.subn(words, text)
    text = html.unescape(MARKS.sub("", ADDRESS.sub(r"\1", text)))
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(NO_PROSE))


def _words(link: re.Match[str]) -> str:
    """What a link shows."""
    if ELSEWHERE.match(link[1]):
        return ""
    return link[1].lstrip(":") if link[2] is None else link[2]


def extracted(file: Path) -> Iterator[str]:
    """The articles in a file of WikiExtractor, without their titles.

    Args:
        file: ``wiki_00`` and its like: ``<doc …>`` above and ``</doc>`` below every article, or with WikiExtractor's
            option ``--json`` an object on every line.
    """
    if next(files.lines(file), "").startswith("{"):
        yield from files.json_texts(file)
        return
    title: str | None = None
    text: list[str] = []
    for line in files.lines(file):
        if title is None:
            if opening := re.fullmatch(r'<doc .*\btitle="(.*)">', line):
                title, text = opening[1], []
            elif line.strip():
                raise RecipeError(f"{file} has text before <doc …>.", hint="Let WikiExtractor write it anew.")
        elif line != "</doc>":
            text.append(html.unescape(line))
        else:
            yield "\n".join(text[1:] if text[:1] == [html.unescape(title)] else text)
            title = None
    if title is not None:
        raise RecipeError(f"{file} ends within the article {title!r}.", hint="Let WikiExtractor write it anew.")
