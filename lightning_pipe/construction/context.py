"""The context in which modules are built without memory."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_pipe.construction.deferred import ASSIGNMENTS, THREAD, call
from lightning_pipe.construction.drawing import SCRATCH
from lightning_pipe.construction.stored import files_unread
from lightning_pipe.torch_internals import TorchDispatchMode, disable_current_modes


class _Construction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what makes and initialises tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call(func, args, kwargs or {}, building=True)


@contextmanager
def deferred_init() -> Generator[None, None, None]:
    """Build modules without memory for their parameters and buffers.

    The constructor runs unchanged. What it does to tensors of more than 16 KiB is recorded; random numbers are drawn
    into memory that is given back at once, so that everything drawn later is what it would have been. Values exist
    when somebody needs them, and are bit for bit those of an ordinary construction with the same seed.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> with deferred_init():
        ...     layer = torch.nn.Linear(1000, 1000)
        >>> _ = torch.manual_seed(0)
        >>> bool((layer.weight == torch.nn.Linear(1000, 1000).weight).all())
        True
    """
    if THREAD.building:
        yield
        return
    THREAD.building = True
    try:
        with files_unread(), _Construction():  # type: ignore[no-untyped-call]
            yield
    finally:
        THREAD.building = False
        SCRATCH.clear()
        ASSIGNMENTS.settle()


@contextmanager
def paused() -> Generator[None, None, None]:
    """Within `deferred_init`: tensors are ordinary ones."""
    before = THREAD.building
    THREAD.building = False
    try:
        with disable_current_modes():
            yield
    finally:
        THREAD.building = before
