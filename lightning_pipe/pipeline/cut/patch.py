"""Replaces parts of torch while steps run, for the threads that run them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pipe.pipeline.cut.stage_run import StageRun


class Patch:
    """Attributes of torch that are replaced as long as any thread needs it.

    They belong to the process, and threads can be ranks of their own: the first puts the replacements in and the last
    takes them out. A replacement asks for the run of its own thread, and does what torch does where there is none.

    Args:
        places: owner, name and replacement of each attribute.
    """

    def __init__(self, *places: tuple[object, str, Any]) -> None:
        self._replacements = places
        self._originals = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in places]
        self._lock = threading.Lock()
        self._users = 0
        self._local = threading.local()

    @property
    def run(self) -> StageRun | None:
        """The stage that runs in this thread, if any."""
        current: Callable[[], StageRun | None] | None = getattr(self._local, "current", None)
        return None if current is None else current()

    @contextmanager
    def installed(self, current: Callable[[], StageRun | None]) -> Iterator[None]:
        """While the context lasts, replacements that this thread calls ask ``current`` which stage runs."""
        with self._lock:
            self._users += 1
            for place in self._replacements:
                setattr(*place)
        before, self._local.current = getattr(self._local, "current", None), current
        try:
            yield
        finally:
            self._local.current = before
            with self._lock:
                self._users -= 1
                if not self._users:
                    for place in self._originals:
                        setattr(*place)
