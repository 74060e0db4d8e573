"""Where Lightning leaves its training loop: batches in flight must be finished before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.patches import replaced

DrainFirst = Callable[..., Any]
"""``drain_first(method, *args, **kwargs)`` finishes what is in flight, then calls the method."""


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """A context in which ``wrapper(method, ...)`` is called in the place of a method."""
    return replaced(owner, name, partial(wrapper, getattr(owner, name)))


@contextmanager
def draining_first(trainer: Any, drain_first: DrainFirst) -> Iterator[None]:
    """Drain before an evaluation, a checkpoint and the end of an epoch.

    Args:
        trainer: the Trainer.
        drain_first: finishes what is in flight.
    """
    fit_loop = trainer.fit_loop
    with ExitStack() as changed:
        for owner, name in (
            (fit_loop.epoch_loop.val_loop, "run"),
            (fit_loop, "on_advance_end"),
            (trainer._checkpoint_connector, "dump_checkpoint"),
        ):
            changed.enter_context(around(owner, name, drain_first))
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                name_file = partial(_name_file, drain_first, callback)
                changed.enter_context(around(callback, "_monitor_candidates", name_file))
        yield


def _name_file(drain_first: DrainFirst, callback: ModelCheckpoint, method: Callable[..., Any], trainer: Any) -> Any:
    """A file is named after the state that is in it: drain before, not when it is written."""
    if callback._should_skip_saving_checkpoint(trainer):
        return method(trainer)
    return drain_first(method, trainer)
