"""Stops all processes after the same batch when any of them has set ``trainer.should_stop``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning_pipe.patches import replaced
from lightning_pipe.trainer.batch_ends import BatchEnds
from lightning_pipe.trainer.world import World


@contextmanager
def stopping_together(trainer: Any, world: World, ends: BatchEnds | None) -> Iterator[None]:
    """Let all processes agree wherever Lightning's training loops ask whether to stop, after the hooks before it.

    Args:
        trainer: the Trainer.
        world: the processes.
        ends: agrees after every batch; ``None`` for asynchronous schedules, which agree by `StopRequests` instead.
    """
    stopping, changed = _Stopping(trainer, world, ends), ExitStack()
    fit_loop = trainer.fit_loop
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (fit_loop, "run", stopping.before),
        (fit_loop, "on_run_start", stopping.after),
        (fit_loop, "on_advance_start", stopping.after),
        (fit_loop, "on_advance_end", stopping.after),
        (fit_loop.epoch_loop.val_loop, "run", stopping.after),
    ]
    if ends is not None:
        changed.enter_context(ends.installed())
        places.append((fit_loop.epoch_loop, "on_advance_end", stopping.at_the_end_of_a_batch))
    with changed:
        for owner, name, wrapper in places:
            # Without a gate: others replace some of these as well, and a gate would lead the wrapper back to itself.
            changed.enter_context(replaced(owner, name, partial(wrapper, getattr(owner, name)), gated=False))
        yield


class _Stopping:
    """Calls methods of Lightning's loops and agrees before or after them."""

    def __init__(self, trainer: Any, world: World, ends: BatchEnds | None) -> None:
        self._trainer, self._world, self._ends = trainer, world, ends
        self._agreed = self._withheld = False

    def before(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self._agree(self._of_world)
        return method(*arguments)

    def after(self, method: Callable[..., Any], *arguments: Any) -> Any:
        result = method(*arguments)
        self._agree(self._of_world)
        return result

    def at_the_end_of_a_batch(self, method: Callable[..., Any], *arguments: Any) -> None:
        """In the place of ``on_advance_end``, which asks whether to stop, as the loop does after it."""
        assert self._ends is not None
        self._agree(self._ends.agree)
        method(*arguments)
        if self._trainer.should_stop and not self._agreed:
            # a learning rate scheduler, say, has set it: this process must not leave before the others know
            self._trainer.should_stop, self._withheld = False, True

    def _of_world(self, asked: bool) -> bool:
        return self._world.agree(asked, unanimous=False)

    def _agree(self, agree: Callable[[bool], bool]) -> None:
        own = bool(self._trainer.should_stop or self._withheld)
        self._trainer.should_stop = self._agreed = agree(own)
        # it may be known to all after the next batch only
        self._withheld = own and not self._agreed
