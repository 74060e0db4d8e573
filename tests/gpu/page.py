"""``python -m tests.gpu.page``: puts what ``results/gpu.json`` holds into the page of results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Finding
from tests.gpu.rows import is_open
from tests.gpu.runner import PARTS, ROOT

RESULTS = ROOT / "results" / "gpu.json"
PAGE = ROOT / "docs" / "results.md"
_EQUAL = ("equal", "passed")


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: for each part how many rows are equal, and every other row with its target.

    Args:
        found: what `tests.gpu.runner.store` has written.
    """
    yield "| part | found | on, with torch, on the day |"
    yield "|---|---|---|"
    for part in PARTS:
        if part.name not in found:
            yield f"| {part.title} | not run | |"
            continue
        rows = [Finding(**row) for row in found[part.name]["rows"]]
        equal = sum(row.value in _EQUAL for row in rows)
        others = [_words(row) for row in rows if row.value not in _EQUAL]
        cells = ([f"{equal} equal"] if equal else []) + others
        status = found[part.name]["status"]
        if status != "done":
            cells.append(f"({status})")
        conditions = found[part.name]["conditions"]
        where = ", ".join(conditions[name] for name in ("devices", "torch", "date"))
        yield f"| {part.title} | {'<br>'.join(cells)} | {where} |"


def _words(row: Finding) -> str:
    if is_open(row) or row.value == "skipped":
        return f"{row.name.split('::')[-1]}: {row.value}"
    target = f" ({row.target})" if row.target else ""
    return f"{row.name}: {row.value}{target}{'' if row.reached is not False else ', **missed**'}"


def written(text: str, results: Path = RESULTS) -> str:
    """The text of the page with the table of a file of results."""
    table = "\n".join(lines(json.loads(results.read_text()))) + "\n"
    return between(text, "gpu", table)


def between(text: str, mark: str, table: str) -> str:
    """The text of a page with a table in its place, from ``<!-- mark -->`` to ``<!-- end -->``."""
    return re.sub(rf"(?<=<!-- {mark} -->\n).*?(?=<!-- end -->)", lambda _: table, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
