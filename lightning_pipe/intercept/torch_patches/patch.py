"""Replaces parts of torch while steps run, for the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from lightning_pipe.patches import all_replaced

Place = tuple[Any, str, Any]
"""An owner, a name, and what stands there meanwhile."""

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun
    from lightning_pipe.intercept.turns.run import TurnRun


class _Local(threading.local):
    """Of one thread: tells which stage runs."""

    current: Callable[[], StageRun | TurnRun | None] | None = None


_local = _Local()


class Patch:
    """Attributes of torch that are replaced as long as any thread needs it, by `installed`.

    Threads can be ranks of their own: a replacement asks for the run of its own thread, and does what torch does where
    there is none.

    Args:
        places: owner, name and replacement of each attribute.
    """

    def __init__(self, *places: Place) -> None:
        self.places = places

    @property
    def run(self) -> StageRun | TurnRun | None:
        """The stage that runs in this thread, if any."""
        current = _local.current
        return None if current is None else current()


@contextmanager
def installed(patches: Iterable[Patch], current: Callable[[], StageRun | TurnRun | None]) -> Iterator[None]:
    """While the context lasts, replacements that this thread calls ask ``current`` which stage runs.

    Within itself it has nothing to do: around a whole run it spares every batch of it the replacing.

    Args:
        patches: what is replaced in torch.
        current: which stage runs in this thread.
    """
    before = _local.current
    if before is current:
        yield
        return
    with all_replaced(chain.from_iterable(patch.places for patch in patches)):
        _local.current = current
        try:
            yield
        finally:
            _local.current = before
