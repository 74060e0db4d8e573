"""The results of experiments as one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from recipes.reproduce.report import HEAD, Outcome, cells

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem; } h3 { font-size: .95rem; margin: .4rem 0; }
p { margin: .2rem 0 .6rem; max-width: 60rem; } .source, figcaption, .note { color: #555; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .22rem .6rem .22rem 0; border-bottom: 1px solid #e3e3e3; }
th { border-bottom: 2px solid #999; } td:first-child { min-width: 14rem; }
td:nth-child(6) { white-space: nowrap; }
.reproduced { color: #1b6e2c; } .in-sample { color: #6b5a00; } .not-reproduced { color: #b3261e; font-weight: 600; }
.shown, .not-run, .not-possible-here { color: #555; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { max-width: 60rem; }
"""

MEANINGS = {
    "reproduced": "within the tolerance",
    "not reproduced": "outside the tolerance; the reason stands below the value",
    "in sample": "within the tolerance, but constants were fitted to it: it shows the fit, and reproduces nothing",
    "shown": "without a claim: published or reproduced value alone, or no tolerance is set",
    "not run": "takes long; runs with --full",
    "not possible here": "needs what a small machine does not have, or has no values; the reason stands beside it",
}


def page(outcomes: Sequence[Outcome], about: str) -> str:
    """The page.

    Args:
        outcomes: the experiments.
        about: machine, date and versions.
    """
    body = "\n".join(section(outcome) for outcome in outcomes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Experiments of the papers</title><style>{STYLE}</style></head>
<body>
<h1>Experiments of GPipe, torchgpipe and Chimera</h1>
<p>{escape(about)}</p>
{_summary(outcomes)}
{body}
</body>
</html>
"""


def section(outcome: Outcome) -> str:
    """One experiment: source, set-up, table, pictures."""
    one = outcome.experiment
    parts = [f'<h2 id="{one.name}">{escape(one.title)}</h2>']
    parts.append(f'<p class="source">{escape(one.citation())}: {escape(one.source.place)}. <code>{one.name}</code></p>')
    parts.append(f"<p>{escape(one.how[0].upper() + one.how[1:])}. {escape(one.set_up)}</p>")
    if one.why:
        parts.append(f"<p>{escape(one.why)}</p>")
    if outcome.not_run:
        parts.append(f'<p class="not-run">Not run: {escape(outcome.not_run)}</p>')
    if outcome.stored:
        parts.append(f"<p>Stored result: {escape(outcome.stored)}.</p>")
    if outcome.result.rows:
        parts.append(rows(outcome))
    pictures = outcome.result.pictures
    parts += [
        f"<figure><h3>{escape(each.title)}</h3>{each.svg}<figcaption>{escape(each.caption)}</figcaption></figure>"
        for each in pictures
    ]
    return "\n".join(parts)


def rows(outcome: Outcome) -> str:
    """The table of one experiment."""
    lines = ["<table>", "<tr>" + "".join(f"<th>{head}</th>" for head in HEAD) + "</tr>"]
    before = ""
    for row in outcome.result.rows:
        texts = [escape(cell) for cell in cells(row, outcome.experiment.how)]
        # A note counts for the rows below it as well, but where a value does not come out it always stands.
        if row.note and (row.note != before or row.verdict == "not reproduced"):
            texts[0] += f'<br><span class="note">{escape(row.note)}</span>'
        before = row.note
        texts[5] = f'<span class="{row.verdict.replace(" ", "-")}">{texts[5]}</span>'
        lines.append("<tr>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>")
    return "\n".join([*lines, "</table>"])


def verdicts(outcome: Outcome) -> Iterator[str]:
    """The verdict of every row; one for an experiment without rows."""
    if outcome.result.rows:
        yield from (row.verdict for row in outcome.result.rows)
    else:
        yield "not run" if outcome.not_run else outcome.experiment.how


def _summary(outcomes: Iterable[Outcome]) -> str:
    lines, total = [], Counter[str]()
    for outcome in outcomes:
        counted = Counter(verdicts(outcome))
        total.update(counted)
        one = outcome.experiment
        told = ", ".join(f"{number} {verdict}" for verdict, number in counted.most_common())
        lines.append(
            f'<tr><td><a href="#{one.name}">{escape(one.title)}</a></td><td>{escape(one.place)}</td>'
            f"<td>{escape(one.how)}</td><td>{told}</td></tr>"
        )
    head = "<tr><th>experiment</th><th>source</th><th>how</th><th>rows</th></tr>"
    meanings = "".join(
        f'<tr><td class="{verdict.replace(" ", "-")}">{verdict}</td><td>{total[verdict]}</td><td>{meaning}</td></tr>'
        for verdict, meaning in MEANINGS.items()
    )
    first = f"<table><tr><th>verdict</th><th>rows</th><th>meaning</th></tr>{meanings}</table>"
    return f"{first}\n<h2>All experiments</h2>\n<table>{head}{''.join(lines)}</table>"
