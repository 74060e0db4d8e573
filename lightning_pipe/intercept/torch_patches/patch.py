"""Replaces parts of torch while steps run, for the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_pipe.patches import all_replaced

Place = tuple[Any, str, Any]
"""An owner, a name, and what stands there meanwhile."""

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun
    from lightning_pipe.intercept.turns.run import TurnRun


_local = threading.local()  # ``current`` tells which stage runs


def current_run() -> StageRun | TurnRun | None:
    """The run of the step in this thread, if any.

    Threads can be ranks of their own: a replacement asks for the run of its own thread, and does what torch does where
    there is none.
    """
    current: Callable[[], StageRun | TurnRun | None] | None = getattr(_local, "current", None)
    return None if current is None else current()


@contextmanager
def installed(places: Iterable[Place], current: Callable[[], StageRun | TurnRun | None]) -> Iterator[None]:
    """While the context lasts, replacements that this thread calls ask ``current`` which stage runs.

    Within itself it has nothing to do: around a whole run it spares every batch of it the replacing.

    Args:
        places: what is replaced in torch.
        current: which stage runs in this thread.
    """
    before = getattr(_local, "current", None)
    if before is current:
        yield
        return
    with all_replaced(places):
        _local.current = current
        try:
            yield
        finally:
            _local.current = before
