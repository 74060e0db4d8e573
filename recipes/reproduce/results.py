"""What an experiment gives: rows with published and reproduced values, and pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from recipes.errors import RecipeError

Value = int | float | Fraction | str | tuple[int | float | Fraction | str, ...]
Verdict = Literal["reproduced", "near", "in sample", "not reproduced", "shown", "not possible here", "not run"]


@dataclass(frozen=True)
class Tolerance:
    """How far a reproduced value may be from the published one.

    Args:
        text: ``"exact"``, a share of the published value as ``"6 %"``, or an absolute one as ``"0.03"``.
    """

    text: str

    def __post_init__(self) -> None:
        if self.text != "exact" and re.fullmatch(r"\d+(\.\d+)?(e-\d+)?( %)?", self.text) is None:
            raise RecipeError(f"{self.text!r} is no tolerance.", hint="Write exact, 6 % or 0.03.")

    def holds(self, published: Value, reproduced: Value) -> bool:
        """Whether the value is within the tolerance.

        Example:
            >>> Tolerance("6 %").holds(3.5, 3.385), Tolerance("0.03").holds(0.25, 0.2589)
            (True, True)
        """
        if self.text == "exact":
            return published == reproduced
        if isinstance(published, tuple) and isinstance(reproduced, tuple):
            return len(published) == len(reproduced) and all(map(self.holds, published, reproduced))
        if isinstance(published, str | tuple) or isinstance(reproduced, str | tuple):
            return published == reproduced
        share = self.text.endswith("%")
        limit = float(self.text.rstrip(" %"))
        allowed = limit / 100 * abs(float(published)) if share else limit
        return abs(float(reproduced) - float(published)) <= allowed * (1 + 1e-12)


@dataclass(frozen=True)
class Row:
    """One value of a paper, and what became of it.

    Args:
        what: the value, with the set-up that distinguishes it from its neighbours.
        published: by the paper; ``None`` for what goes beyond it.
        reproduced: here; ``None`` where that is not possible, with the reason in ``note``.
        tolerance: ``None`` where the value is shown without a claim.
        unit: of both values.
        in_sample: constants were fitted to the published value, so that it says nothing to come near it.
        note: a reason, or what the value rests on.
        near: a wider tolerance, within which a value that is not reproduced is called near.
    """

    what: str
    published: Value | None
    reproduced: Value | None
    tolerance: Tolerance | None = None
    unit: str = ""
    in_sample: bool = False
    note: str = ""
    near: Tolerance | None = None

    @property
    def verdict(self) -> Verdict:
        """What the value is called."""
        if self.reproduced is None:
            return "not possible here"
        if self.published is None or self.tolerance is None:
            return "shown"
        if self.tolerance.holds(self.published, self.reproduced):
            return "in sample" if self.in_sample else "reproduced"
        if self.near is not None and self.near.holds(self.published, self.reproduced):
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


def entry(row: Row) -> dict[str, Any]:
    """A row as JSON has it; the writer says what becomes of fractions."""
    limits = ((name, getattr(row, name)) for name in ("tolerance", "near"))
    return asdict(row) | {name: limit.text if limit else None for name, limit in limits}


TEN, TWENTY = Tolerance("10 %"), Tolerance("20 %")


def near(
    what: str, published: Value, reproduced: Value, unit: str = "", in_sample: bool = False, note: str = ""
) -> Row:
    """A simulated value: reproduced within 10 %, near within 20 %. The arguments are those of `Row`."""
    return Row(what, published, reproduced, TEN, unit, in_sample, note, TWENTY)


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

    @classmethod
    def of(cls, rows: Iterable[Row], *pictures: Picture) -> Result:
        """From any rows."""
        return cls(tuple(rows), pictures)


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
