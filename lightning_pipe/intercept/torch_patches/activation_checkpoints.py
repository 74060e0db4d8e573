"""Lets ``torch.utils.checkpoint`` surround layers.

A checkpoint keeps its arguments. On a stage that waits these are placeholders, and a placeholder that is kept cannot be
filled. So around skipped layers a checkpoint does nothing, and before the first local one the placeholders are filled.

In the backward pass a checkpoint runs its function again, when no step runs any more. Then layers, and random functions
between them, must draw from the streams from which they drew the first time: these are noted, and used again in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.random_streams import Stream
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.intercept.torch_functions import draws, function_name

# What ``torch.utils.checkpoint.checkpoint``, which users have imported before, looks up when it is called, giving its
# function first. It has a new name in torch 2.15, where the older one leads to it.
_OTHER = "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{_OTHER}_impl"):
    _OTHER += "_impl"
_other = getattr(torch_checkpoint, _OTHER)

_local = threading.local()


def _again(function: Callable[..., Any], streams: Sequence[Stream]) -> Callable[..., Any]:
    """The function of a checkpoint for later times, with the random streams of the first one."""

    def called(*args: Any, **kwargs: Any) -> Any:
        before, _local.replay = getattr(_local, "replay", None), _Replay(iter(streams))
        try:
            with _local.replay:
                return function(*args, **kwargs)
        finally:
            _local.replay = before

    return called


class _Replay(TorchFunctionMode):
    """Gives random functions, layers and modules their streams of the first time."""

    def __init__(self, streams: Iterator[Stream]) -> None:
        super().__init__()
        self._streams, self._inside = streams, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random = draws(func, function_name(func))
        return self.call(func, args, kwargs or {}) if random else func(*args, **(kwargs or {}))

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:
            return function(*args, **kwargs)
        self._inside = True
        try:
            with next(self._streams)():
                return function(*args, **kwargs)
        finally:
            self._inside = False


def run_again(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a layer when no step runs: plainly, or again for a checkpoint."""
    replay: _Replay | None = getattr(_local, "replay", None)
    return forward(*args, **kwargs) if replay is None else replay.call(forward, args, kwargs)


def _without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    run = under_way.run
    if run is not None and run.tracker.waiting:
        if run.pending is None or not run.tracker.complete:  # it surrounds a skipped layer
            yield
            return
        run.arrive()
    if run is None or run.surroundings.inside or run.tracker.function:
        yield from _other(function, *args, **kwargs)
        return
    if run.surroundings.checkpoint is not None:
        raise CutError(
            "a checkpoint surrounds layers and is inside another one.",
            hint="Use torch.utils.checkpoint once around a layer, or inside layers.",
        )
    streams: list[Stream] = []
    run.surroundings.checkpoint = streams
    try:
        yield from _other(_again(function, streams), *args, **kwargs)
    finally:
        run.surroundings.checkpoint = None


CHECKPOINTS = ((torch_checkpoint, _OTHER, _without_reentrant),)
"""While it is installed, checkpoints look whether a stage waits."""
