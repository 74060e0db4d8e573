"""Published figures of the papers, with paper and table or figure."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError


@cache
def paper(name: str) -> dict[str, Any]:
    """Everything kept of a paper.

    Args:
        name: chimera, gpipe or torchgpipe.
    """
    path = Path(__file__).with_name(f"{name}.json")
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in path.parent.glob("*.json")))
        raise RecipeError(f"No figures of {name!r} are kept.", hint=f"There are {known}.")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def published(name: str, place: str) -> Any:
    """The values of a table or figure.

    Args:
        name: of the paper.
        place: as ``"Table 2"``.
    """
    return paper(name)[place]["values"]
