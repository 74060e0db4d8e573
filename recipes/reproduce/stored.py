"""Results of experiments that take long, kept with machine and date: ``all`` shows them without running them."""

from __future__ import annotations

import json
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from recipes.reproduce.results import Picture, Result, Row, Tolerance, Value

FOLDER = Path(__file__).with_name("stored")


def store(name: str, result: Result, about: str, folder: Path = FOLDER) -> Path:
    """Keeps a result in the place of an earlier one.

    Args:
        name: of the experiment.
        result: its rows and pictures.
        about: machine, date, and how long it took.
        folder: where.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(row) | {"tolerance": row.tolerance.text if row.tolerance else None} for row in result.rows]
    content = {"about": about, "rows": rows, "pictures": [asdict(each) for each in result.pictures]}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=_plain) + "\n", encoding="utf-8")
    return path


def stored(name: str, folder: Path = FOLDER) -> tuple[Result, str] | None:
    """A result that was kept, and what it says of itself; ``None`` if there is none.

    Args:
        name: of the experiment.
        folder: where.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        Row(
            **row
            | {
                "tolerance": None if row["tolerance"] is None else Tolerance(row["tolerance"]),
                "published": _read(row["published"]),
                "reproduced": _read(row["reproduced"]),
            }
        )
        for row in content["rows"]
    ]
    return Result.of(rows, *(Picture(**each) for each in content["pictures"])), str(content["about"])


def _plain(value: object) -> object:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{value!r} cannot be stored")


def _read(value: Any) -> Value | None:
    return tuple(value) if isinstance(value, list) else value
