"""The results of experiments as a table of text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from recipes.reproduce.experiments import Experiment
from recipes.reproduce.results import Result, Row, Value, shown

HEAD = ("value", "published", "reproduced", "difference", "tolerance", "verdict", "how")
WIDTH = 46


@dataclass(frozen=True)
class Outcome:
    """An experiment with what came of it.

    Args:
        experiment: the experiment.
        result: its rows and pictures.
        stored: machine and date of a result that an earlier run has left.
        not_run: why there is no result.
    """

    experiment: Experiment
    result: Result
    stored: str = ""
    not_run: str = ""


def cells(row: Row, how: str) -> tuple[str, ...]:
    """A row of the table."""
    unit = f" {row.unit}" if row.unit else ""

    def told(value: Value | None) -> str:
        return shown(value) + (unit if value is not None else "")

    tolerance = row.tolerance.text if row.tolerance else ""
    return row.what, told(row.published), told(row.reproduced), row.difference, tolerance, row.verdict, how


def table(outcomes: Iterable[Outcome]) -> str:
    """All rows as text, and how many of each verdict there are."""
    lines: list[str] = []
    verdicts: Counter[str] = Counter()
    for outcome in outcomes:
        one = outcome.experiment
        stored = f"; stored result: {outcome.stored}" if outcome.stored else ""
        lines += ["", f"{one.name}: {one.title} ({one.place}; {one.how}{stored})"]
        if not outcome.result.rows:
            verdict = "not run" if outcome.not_run else outcome.experiment.how
            verdicts[verdict] += 1
            lines.append(f"  {verdict}: {outcome.not_run or one.why}")
            continue
        rows = [cells(row, one.how)[:-1] for row in outcome.result.rows]
        verdicts.update(row.verdict for row in outcome.result.rows)
        widths = [min(WIDTH, max(len(line[index]) for line in [HEAD[:-1], *rows])) for index in range(len(HEAD) - 1)]
        for line, row in zip(rows, outcome.result.rows, strict=True):
            lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
            if row.verdict == "not reproduced":
                lines.append(f"      {row.note}")
    total = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    return "\n".join([*lines, "", f"{sum(verdicts.values())} rows: {total}"]).lstrip("\n")


def as_json(outcomes: Iterable[Outcome]) -> str:
    """All rows for other programs."""
    return json.dumps([_entry(outcome) for outcome in outcomes], indent=2, ensure_ascii=False) + "\n"


def _entry(outcome: Outcome) -> dict[str, Any]:
    one = outcome.experiment
    return {
        "experiment": one.name,
        "title": one.title,
        "source": {"paper": one.source.paper, "place": one.source.place, "citation": one.citation()},
        "how": one.how,
        "set_up": one.set_up,
        "why": outcome.not_run or one.why,
        "stored": outcome.stored,
        "rows": list(_rows(outcome.result)),
    }


def _rows(result: Result) -> Iterator[dict[str, Any]]:
    for row in result.rows:
        yield {
            "what": row.what,
            "published": _plain(row.published),
            "reproduced": _plain(row.reproduced),
            "unit": row.unit,
            "difference": row.difference,
            "tolerance": row.tolerance.text if row.tolerance else None,
            "verdict": row.verdict,
            "note": row.note,
        }


def _plain(value: Value | None) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Fraction) else value
