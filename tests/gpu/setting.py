"""Where a part runs; the runner's own tests import it without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Args:
        devices: how many there are.
        small: sizes that a CPU goes through in seconds, for rehearsals.
    """

    devices: int = 1
    small: bool = False
