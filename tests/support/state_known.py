"""What the table owes and does not keep today: strict xfails, by name, with the reason."""

from __future__ import annotations

UNEQUAL: dict[str, tuple[str, str]] = {}
"""By program: why, and in which phases and schedules."""
