"""A clock that stands still while its process does."""

from __future__ import annotations

import time

_MOST = 1.0
"""Seconds that count between two looks at a clock: a longer time is one for which the process was suspended."""


class Clock:
    """Whether some seconds are over; those for which this process is suspended (Ctrl-Z) do not count.

    Who waits for others looks at it in every round. A process that is stopped and goes on later would otherwise find
    its time over although the others were there all the while.

    Args:
        seconds: after which it is over.
    """

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def is_over(self) -> bool:
        """Look, several times a second: of a longer time between two looks only the first second counts."""
        now = time.monotonic()
        self._left -= min(now - self._looked, _MOST)
        self._looked = now
        return self._left < 0
