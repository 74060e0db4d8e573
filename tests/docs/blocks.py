"""Reads the blocks of code out of the Markdown pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
NAMED = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "recipes" / "README.md",
    *sorted((ROOT / "recipes" / "docs").glob("*.md")),
]
"""All pages, also those whose blocks the tests of the recipes look after."""
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in _FENCE.finditer(text)]


def named(*languages: str) -> list[Block]:
    """The blocks of all pages in some languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]
