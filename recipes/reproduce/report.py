"""The results of experiments as Markdown, which the terminal shows and the page is made of, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template

from recipes.reproduce.experiments import Experiment
from recipes.reproduce.results import Result, shown

HEAD = ("value", "published", "here", "difference", "tolerance", "verdict", "note")
MEANINGS = {
    "reproduced": "within the tolerance",
    "near": "outside the tolerance, but within 20 %: not reproduced",
    "not reproduced": "outside the tolerance; the reason is the note",
    "in sample": "within 20 %, but constants were fitted to it: it shows the fit, and reproduces nothing",
    "shown": "without a claim: published or reproduced value alone, or no tolerance is set",
    "not possible here": "needs what a small machine does not have, or has no values; the reason stands beside it",
}
PAGE = Path(__file__).with_name("page.html")


Outcome = tuple[Experiment, Result]
"""An experiment with what came of it."""


def _verdicts(outcome: Outcome) -> Counter[str]:
    """How many rows have which verdict; an experiment without rows counts as one."""
    experiment, result = outcome
    return Counter([str(row.verdict) for row in result.rows] or [experiment.how])


def text(outcomes: Sequence[Outcome]) -> str:
    """All rows, and how many of each verdict there are."""
    total = sum(map(_verdicts, outcomes), Counter[str]())
    return "\n\n".join([*map(_rows, outcomes), f"{total.total()} rows: {_counts(total)}"])


def page(outcomes: Sequence[Outcome], about: str) -> str:
    """One HTML file that needs nothing beside it.

    Args:
        outcomes: the experiments.
        about: machine, date and versions.
    """
    from markdown_it import MarkdownIt

    total = sum(map(_verdicts, outcomes), Counter[str]())
    parts = ["# Experiments of GPipe, torchgpipe and Chimera", about]
    parts.append(table(("verdict", "rows", "meaning"), [(name, str(total[name]), MEANINGS[name]) for name in MEANINGS]))
    every = [
        (f"[{one.title}](#{one.name})", one.place, one.how, _counts(_verdicts((one, result))))
        for one, result in outcomes
    ]
    parts += ["## All experiments", table(("experiment", "source", "how", "rows"), every)]
    for one, result in outcomes:
        parts += [
            f'<a id="{one.name}"></a>',
            f"## {one.title}",
            f"{one.citation()}: {one.source.place}",
            f"{one.set_up} {one.why}",
            _rows((one, result)),
        ]
        for picture in result.pictures:
            drawn = "\n".join(line for line in picture.svg.splitlines() if line.strip())  # an empty line ends HTML
            parts += [f"### {picture.title}", f"<div>\n{drawn}\n</div>", picture.caption]
    body = MarkdownIt("commonmark").enable("table").render("\n\n".join(parts))
    return Template(PAGE.read_text(encoding="utf-8")).substitute(body=body)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""A table in Markdown, whose columns are aligned but for the last.

    Example:
        >>> print(table(("a", "b"), [("long", "1"), ("x", "2|3")]))
        | a    | b |
        |------|---|
        | long | 1 |
        | x    | 2\|3 |
    """
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[-1] = 0
    told = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = "|".join("-" * (max(width, len(name)) + 2) for width, name in zip(widths, head, strict=True))
    return "\n".join([f"| {told[0]} |", f"|{rule}|", *(f"| {line} |" for line in told[1:])])


def _rows(outcome: Outcome) -> str:
    """The rows of one experiment below its name."""
    (one, result), lines, before = outcome, [], ""
    stored = f"; stored result: {result.about}" * bool(result.about)
    title = f"{one.name}: {one.title} ({one.place}; {one.how}{stored})"
    if not result.rows:
        return f"{title}\n\n{one.how}: {one.why}"
    for row in result.rows:
        published, reproduced = (
            "–" if value is None else f"{shown(value)} {row.unit}".rstrip()  # noqa: RUF001
            for value in (row.published, row.reproduced)
        )
        missed = row.verdict == "not reproduced"
        # A note counts for the rows below it as well, but where a value does not come out it always stands.
        note = row.note if missed or row.note != before else ""
        verdict = f"**{row.verdict}**" if missed else row.verdict
        tolerance = row.tolerance or ""
        lines.append((row.what, published, reproduced, row.difference, tolerance, verdict, note))
        before = row.note
    return f"{title}\n\n{table(HEAD, lines)}"


def _counts(verdicts: Counter[str]) -> str:
    return ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())


def as_json(outcomes: Sequence[Outcome], about: str) -> str:
    """All rows for other programs.

    Args:
        outcomes: the experiments.
        about: machine, date and versions.
    """
    told = []
    for one, result in outcomes:
        source = {"paper": one.source.paper, "place": one.source.place, "citation": one.citation()}
        rows = [asdict(row) | {"difference": row.difference, "verdict": row.verdict} for row in result.rows]
        what = {"experiment": one.name, "title": one.title, "source": source, "how": one.how, "set_up": one.set_up}
        told.append(what | {"why": one.why, "about": result.about or about, "rows": rows})
    return json.dumps(told, indent=2, ensure_ascii=False, default=str) + "\n"
