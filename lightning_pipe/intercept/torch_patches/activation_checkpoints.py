"""Lets ``torch.utils.checkpoint`` surround layers.

A checkpoint keeps its arguments. On a stage that waits these are placeholders, and a placeholder that is kept cannot be
filled. So around skipped layers a checkpoint does nothing, and before the first local one the placeholders are filled.

In the backward pass a checkpoint runs its function again, when no step runs any more. Then layers, and random functions
between them, must draw from the streams from which they drew the first time: these are noted, and used again in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.torch_functions import draws, function_name
from lightning_pipe.intercept.torch_patches.patch import Patch

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun
    from lightning_pipe.intercept.turns.run import TurnRun

# The two things that ``torch.utils.checkpoint.checkpoint`` looks up when it is called, giving its function first: users
# have imported it before. The second has a new name in torch 2.15, where the older one leads to it.
_OTHER = "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{_OTHER}_impl"):
    _OTHER += "_impl"
_reentrant = torch_checkpoint.CheckpointFunction
_other = getattr(torch_checkpoint, _OTHER)

_local = threading.local()

Stream = Callable[[], AbstractContextManager[None]]


class Checkpoint:
    """A checkpoint outside layers: the random streams of what it runs, in order.

    Args:
        reentrant: whether it runs without gradients the first time: none would come back over a cut inside.
        begin: how many calls the run had made before.
    """

    def __init__(self, reentrant: bool, begin: int) -> None:
        self.reentrant, self.begin = reentrant, begin
        self.streams: list[Stream] = []

    def first(self, run: StageRun | TurnRun, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for the first time and for later ones."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if CHECKPOINTS.run is run:
                with self.noted(run):
                    return function(*args, **kwargs)
            return self.again(function)(*args, **kwargs)

        return called

    @contextmanager
    def noted(self, run: StageRun | TurnRun) -> Iterator[None]:
        """Around the first time."""
        if run.surroundings.checkpoint is not None:
            raise CutError(
                "a checkpoint surrounds layers and is inside another one.",
                hint="Use torch.utils.checkpoint once around a layer, or inside layers.",
            )
        run.surroundings.checkpoint = self
        try:
            yield
        finally:
            run.surroundings.checkpoint = None

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for later times."""

        def called(*args: Any, **kwargs: Any) -> Any:
            before, _local.replay = getattr(_local, "replay", None), _Replay(iter(self.streams))
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


def _passes_over() -> bool:
    """Whether the checkpoint that begins now surrounds a skipped layer; fills the placeholders if it does not."""
    run = CHECKPOINTS.run
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
        run = CHECKPOINTS.run
        if run is not None and not (run.inside or run.tracker.function):
            function = Checkpoint(True, len(run.tracker.calls)).first(run, function)
        return _reentrant.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]


def _without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    if _passes_over():
        yield
        return
    run = CHECKPOINTS.run
    if run is None or run.inside or run.tracker.function:
        yield from _other(function, *args, **kwargs)
        return
    checkpoint = Checkpoint(False, len(run.tracker.calls))
    with checkpoint.noted(run):
        yield from _other(checkpoint.again(function), *args, **kwargs)


CHECKPOINTS = Patch(
    (torch_checkpoint, "CheckpointFunction", _Reentrant),
    (torch_checkpoint, _OTHER, _without_reentrant),
)
"""While it is installed, checkpoints look whether a stage waits."""
