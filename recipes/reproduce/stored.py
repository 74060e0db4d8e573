"""Results of experiments that take long, kept with machine and date: ``all`` shows them without running them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.reproduce.results import Picture, Result, Row, Tolerance, entry

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
    pictures = [asdict(each) for each in result.pictures]
    content = {"about": about, "rows": [entry(row) for row in result.rows], "pictures": pictures}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=float) + "\n", encoding="utf-8")
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
    return Result.of(map(_row, content["rows"]), *(Picture(**each) for each in content["pictures"])), content["about"]


def _row(stored: dict[str, Any]) -> Row:
    values = {
        name: tuple(one) if isinstance(one := stored[name], list) else one for name in ("published", "reproduced")
    }
    limits = {name: Tolerance(text) if (text := stored.get(name)) else None for name in ("tolerance", "near")}
    return Row(**stored | values | limits)
