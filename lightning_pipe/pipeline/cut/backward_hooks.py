"""Lets modules with backward hooks be called on all stages.

``register_full_backward_hook`` puts a node into the graph before and behind a module. Where an earlier stage computes
the module there is no graph: the hook runs on the rank that computes it. There, what comes out of a node counts as the
tensor that went in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from lightning_pipe.pipeline.cut.placeholder import Placeholder

if TYPE_CHECKING:
    from lightning_pipe.pipeline.cut.stage_run import StageRun

_original = BackwardHook._apply_on_tensors
_local = threading.local()
_lock = threading.Lock()
_users = 0


@contextmanager
def backward_hooks_know(current: Callable[[], StageRun | None]) -> Iterator[None]:
    """While the context lasts, backward hooks that this thread sets up ask ``current`` which stage runs."""
    global _users  # noqa: PLW0603 - torch's class is global too
    with _lock:
        _users += 1
        BackwardHook._apply_on_tensors = _apply_on_tensors  # type: ignore[method-assign]
    before, _local.current = getattr(_local, "current", None), current
    try:
        yield
    finally:
        _local.current = before
        with _lock:
            _users -= 1
            if not _users:
                BackwardHook._apply_on_tensors = _original  # type: ignore[method-assign]


def _apply_on_tensors(self: BackwardHook, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    current = getattr(_local, "current", None)
    run: StageRun | None = current() if current is not None else None
    if run is None or run.inside:
        return _original(self, fn, args)  # type: ignore[no-untyped-call]
    if run.tracker.waiting and run.tracker.complete:
        run.arrive()  # it is this stage's first layer
    if any(isinstance(arg, Placeholder) for arg in args):
        return args, None
    with run.tracker.paused():
        results, places = _original(self, fn, args)  # type: ignore[no-untyped-call]
    is_output = self.n_inputs >= 0  # known from the first call on, which is for the input
    for old, new in zip(args, results, strict=True):
        if isinstance(old, Tensor) and new is not old:
            run.tracker.rename(old, new, replace=is_output)
    return results, places
