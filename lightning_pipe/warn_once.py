"""Warnings that a run gives at most once."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_warn


class WarnOnce:
    """Warns on process 0, once for each key."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def __call__(self, key: str, message: str) -> None:
        """Warn, unless a warning with the same key was given before."""
        if key not in self._keys:
            self._keys.add(key)
            rank_zero_warn(message)
