"""Replaces parts of torch while steps run, for the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_pipe.patches import all_replaced

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun
    from lightning_pipe.intercept.turns.run import TurnRun


class Patch:
    """Attributes of torch that are replaced as long as any thread needs it.

    Threads can be ranks of their own: a replacement asks for the run of its own thread, and does what torch does where
    there is none.

    Args:
        places: owner, name and replacement of each attribute.
    """

    def __init__(self, *places: tuple[object, str, Any]) -> None:
        self._places = places
        self._local = threading.local()

    @property
    def run(self) -> StageRun | TurnRun | None:
        """The stage that runs in this thread, if any."""
        current: Callable[[], StageRun | TurnRun | None] | None = getattr(self._local, "current", None)
        return None if current is None else current()

    @contextmanager
    def installed(self, current: Callable[[], StageRun | TurnRun | None]) -> Iterator[None]:
        """While the context lasts, replacements that this thread calls ask ``current`` which stage runs."""
        before = getattr(self._local, "current", None)
        with all_replaced(self._places):
            self._local.current = current
            try:
                yield
            finally:
                self._local.current = before
