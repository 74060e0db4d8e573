"""Lets ``torch.utils.checkpoint`` pass over layers that other stages run.

A checkpoint keeps its arguments. On a stage that waits these are placeholders, and a placeholder that is kept cannot be
filled. So around foreign layers a checkpoint does nothing, and before the first local one the placeholders are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from lightning_pipe.pipeline.cut.patch import Patch

# The two things that ``torch.utils.checkpoint.checkpoint`` looks up when it is called (torch 2.13).
_reentrant = torch_checkpoint.CheckpointFunction
_other = torch_checkpoint._checkpoint_without_reentrant_generator


def _passes_over() -> bool:
    """Whether the checkpoint that begins now surrounds a foreign layer; fills the placeholders if it does not."""
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
        return _reentrant.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]


def _without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
    if _passes_over():
        yield
        return
    yield from _other(*args, **kwargs)


CHECKPOINTS = Patch(
    (torch_checkpoint, "CheckpointFunction", _Reentrant),
    (torch_checkpoint, "_checkpoint_without_reentrant_generator", _without_reentrant),
)
"""While it is installed, checkpoints look whether a stage waits."""
