"""Lets ``torch.utils.checkpoint`` pass over layers that other stages run.

A checkpoint keeps its arguments. On a stage that waits these are placeholders, and a placeholder that is kept cannot be
filled. So around foreign layers a checkpoint does nothing, and before the first local one the placeholders are filled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint as torch_checkpoint

if TYPE_CHECKING:
    from lightning_pipe.pipeline.cut.stage_run import StageRun

# The two things that ``torch.utils.checkpoint.checkpoint`` looks up when it is called (torch 2.13).
_reentrant = torch_checkpoint.CheckpointFunction
_other = torch_checkpoint._checkpoint_without_reentrant_generator

_local = threading.local()
_lock = threading.Lock()
_users = 0


@contextmanager
def checkpoints_know(current: Callable[[], StageRun | None]) -> Iterator[None]:
    """While the context lasts, checkpoints in this thread ask ``current`` whether a stage waits."""
    global _users  # noqa: PLW0603 - torch's module is global too
    with _lock:
        _users += 1
        torch_checkpoint.CheckpointFunction = _Reentrant  # type: ignore[misc]
        torch_checkpoint._checkpoint_without_reentrant_generator = _without_reentrant
    before, _local.current = getattr(_local, "current", None), current
    try:
        yield
    finally:
        _local.current = before
        with _lock:
            _users -= 1
            if not _users:
                torch_checkpoint.CheckpointFunction = _reentrant  # type: ignore[misc]
                torch_checkpoint._checkpoint_without_reentrant_generator = _other


def _passes_over() -> bool:
    """Whether the checkpoint that begins now surrounds a foreign layer; fills the placeholders if it does not."""
    current = getattr(_local, "current", None)
    run: StageRun | None = current() if current is not None else None
    if run is None or not run.tracker.waiting:
        return False
    if run.tracker.complete:
        run.arrive()
        return False
    return True


class _Reentrant(_reentrant):
    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if _passes_over():
            return function(*args)
        return _reentrant.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]


def _without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
    if _passes_over():
        yield
        return
    yield from _other(*args, **kwargs)
