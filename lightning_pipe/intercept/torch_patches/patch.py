"""Which run of the step what is replaced in torch follows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun


class _UnderWay(threading.local):
    run: StageRun | None = None


under_way = _UnderWay()
"""Its ``run`` is the run of the step in this thread: for the wrappers of layers, which ask for every call."""


def current_run() -> StageRun | None:
    """The run of the step in this thread; where there is none a replacement does what torch does."""
    return under_way.run


@contextmanager
def running(run: StageRun) -> Iterator[None]:
    """While the context lasts, replacements that this thread calls follow ``run``."""
    before, under_way.run = under_way.run, run
    try:
        yield
    finally:
        under_way.run = before
