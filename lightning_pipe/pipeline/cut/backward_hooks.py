"""Lets modules with backward hooks be called on all stages.

``register_full_backward_hook`` puts a node into the graph before and behind a module. Where an earlier stage computes
the module there is no graph: the hook runs on the rank that computes it. There, what comes out of a node counts as the
tensor that went in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from lightning_pipe.pipeline.cut.patch import Patch
from lightning_pipe.pipeline.cut.placeholder import Placeholder

_original = BackwardHook._apply_on_tensors


def _apply_on_tensors(self: BackwardHook, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    run = BACKWARD_HOOKS.run
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
            run.tracker.numbers.rename(old, new, replace=is_output)
    return results, places


BACKWARD_HOOKS = Patch((BackwardHook, "_apply_on_tensors", _apply_on_tensors))
"""While it is installed, backward hooks that are set up look where their module runs."""
