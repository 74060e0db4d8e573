"""What an experiment gives: rows with published and reproduced values, and pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

from recipes.errors import RecipeError

Value = int | float | Fraction | str | tuple[int | float | Fraction | str, ...]
Verdict = Literal["reproduced", "near", "in sample", "not reproduced", "shown", "not possible here"]


def holds(tolerance: str, published: Value, reproduced: Value) -> bool:
    """Whether a value is within a tolerance.

    Args:
        tolerance: how far it may be from the published one: ``"exact"``, a share of that as ``"6 %"``, or an absolute
            one as ``"0.03"``.
        published: by the paper.
        reproduced: here.

    Example:
        >>> holds("6 %", 3.5, 3.385), holds("0.03", 0.25, 0.2589)
        (True, True)
    """
    if tolerance == "exact":
        return published == reproduced
    if isinstance(published, tuple) and isinstance(reproduced, tuple):
        return len(published) == len(reproduced) and all(map(partial(holds, tolerance), published, reproduced))
    if isinstance(published, str | tuple) or isinstance(reproduced, str | tuple):
        return published == reproduced
    limit = float(tolerance.rstrip(" %"))
    allowed = limit / 100 * abs(float(published)) if tolerance.endswith("%") else limit
    return abs(float(reproduced) - float(published)) <= allowed * (1 + 1e-12)


@dataclass(frozen=True)
class Row:
    """One value of a paper, and what became of it.

    Args:
        what: the value, with the set-up that distinguishes it from its neighbours.
        published: by the paper; ``None`` for what goes beyond it.
        reproduced: here; ``None`` where that is not possible, with the reason in ``note``.
        tolerance: as `holds` takes it; ``None`` where the value is shown without a claim.
        unit: of both values.
        in_sample: constants were fitted to the published value, so that it says nothing to come near it.
        note: a reason, or what the value rests on.
        near: a wider tolerance, within which a value that is not reproduced is called near.
    """

    what: str
    published: Value | None
    reproduced: Value | None
    tolerance: str | None = None
    unit: str = ""
    in_sample: bool = False
    note: str = ""
    near: str | None = None

    def __post_init__(self) -> None:
        for text in (self.tolerance, self.near):
            if text not in (None, "exact") and re.fullmatch(r"\d+(\.\d+)?(e-\d+)?( %)?", str(text)) is None:
                raise RecipeError(f"{text!r} is no tolerance.", hint="Write exact, 6 % or 0.03.")

    @property
    def verdict(self) -> Verdict:
        """What the value is called."""
        if self.reproduced is None:
            return "not possible here"
        if self.published is None or self.tolerance is None:
            return "shown"
        if holds(self.tolerance, self.published, self.reproduced):
            return "in sample" if self.in_sample else "reproduced"
        if self.near is not None and holds(self.near, self.published, self.reproduced):
            return "in sample" if self.in_sample else "near"
        return "not reproduced"

    @property
    def difference(self) -> str:
        """Reproduced less published, of several the largest: in percent of the published value, or that of zero."""
        if self.published is None or self.reproduced is None:
            return ""
        if self.published == self.reproduced:
            return "0"
        several = isinstance(self.published, tuple)
        both = (value if isinstance(value, tuple) else (value,) for value in (self.published, self.reproduced))
        pairs = [(a, b) for a, b in zip(*both, strict=False) if not isinstance(a, str) and not isinstance(b, str)]
        if shares := [100 * (float(b) / float(a) - 1) for a, b in pairs if a]:
            return f"{max(shares, key=abs):+.1f} %"
        return f"{float(pairs[0][1]):+.3g}" if pairs and not several else ""


def near(
    what: str, published: Value | None, reproduced: Value, unit: str = "", in_sample: bool = False, note: str = ""
) -> Row:
    """A simulated or measured value: reproduced within 10 %, near within 20 %. The arguments are those of `Row`."""
    return Row(what, published, reproduced, "10 %", unit, in_sample, note, "20 %")


def shares(rows: Iterable[Row]) -> Row:
    """How many of the values that `near` has made are reproduced, and how many at least near; none is in sample."""
    told = [row.verdict for row in rows if row.near is not None and not row.in_sample]
    within = [sum(verdict in among for verdict in told) for among in (("reproduced",), ("reproduced", "near"))]
    text = " and ".join(f"{100 * number / len(told):.0f} %" for number in within)
    return Row(f"of {len(told)} values out of sample, within 10 % and 20 %", None, text)


@dataclass(frozen=True)
class Picture:
    """A figure as SVG.

    Args:
        title: above it.
        svg: without XML head.
        caption: below it: axes, sources, and what is in sample.
    """

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Result:
    """What an experiment gives."""

    rows: tuple[Row, ...]
    pictures: tuple[Picture, ...] = ()
    about: str = ""  # the machine and the date of a stored one

    @classmethod
    def of(cls, rows: Iterable[Row], *pictures: Picture) -> Result:
        """From any rows."""
        return cls(tuple(rows), pictures)

    @classmethod
    def stored(cls, path: Path) -> Result:
        """The rows in the JSON of a run by name, with the machine that it ran on."""
        (told,) = json.loads(path.read_text(encoding="utf-8"))
        rows = ({field.name: row[field.name] for field in fields(Row)} for row in told["rows"])
        return cls(tuple(Row(**row) for row in rows), about=told["about"])


def shown(value: Value | None) -> str:
    """A value as text.

    Example:
        >>> shown(Fraction(3, 11)), shown(669790012), shown(0.857142), shown((1, 2)), shown(None)
        ('3/11', '669,790,012', '0.8571', '1, 2', '–')
    """  # noqa: RUF002
    if value is None:
        return "–"  # noqa: RUF001
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)
