"""What a step draws from that is its module's own: random generators and iterators which are attributes.

Each run of a step takes from them, and one device runs it once for each micro-batch. Stages compare what they give to
calls, so other items on one of two stages are an error there. Nobody compares what is watched here: runs that come to
nothing put back what they have taken; what runs again, or in several pipes, must take nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.module_state import Tracked, generator_state, set_generator_state

_HINT = (
    "Draw from the global generators of torch, NumPy or Python: their numbers depend on the step and the micro-batch "
    "alone. Let items come with the batch (CombinedLoader), or take them in a hook: on_train_batch_start."
)


class SourcesOfRun:
    """Watches what one run of a step takes.

    Args:
        tracked: the modules whose attributes count.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._generators = [(name, each, generator_state(each)) for name, each in tracked.generators()]
        self._iterators = [(name, _Watched(holder, iterator)) for name, holder, iterator in tracked.iterators()]

    def end(self) -> set[str]:
        """The run is over: the names of what it has taken something from."""
        found = {name for name, each, state in self._generators if generator_state(each) != state}
        return found.union([name for name, watched in self._iterators if watched.end()])

    def put_back(self) -> None:
        """Let the next run take the same again."""
        for _, generator, state in self._generators:
            if generator_state(generator) != state:
                set_generator_state(generator, state)
        for _, watched in self._iterators:
            watched.put_back()


class _Watched(Iterator[Any]):
    """Stands in the place of an iterator that is an attribute.

    Args:
        place: the mapping or list that holds it, and the key there.
        iterator: what is there.
    """

    def __init__(self, place: tuple[Any, Any], iterator: Iterator[Any]) -> None:
        self._place, self._iterator = place, iterator
        self._items: list[Any] = []
        self._ended = False
        holder, key = place
        holder[key] = self

    def __next__(self) -> Any:
        item = next(self._iterator)
        if not self._ended:
            self._items.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def end(self) -> int:
        """Put the iterator into its place again, unless the step has put another one there; the number of items."""
        self._ended = True
        self._replace(self, self._iterator)
        return len(self._items)

    def put_back(self) -> None:
        """Let the same items come again."""
        if self._items:
            self._replace(self._iterator, chain(self._items, self._iterator))

    def _replace(self, before: Iterator[Any], after: Iterator[Any]) -> None:
        holder, key = self._place
        with suppress(LookupError):
            if holder[key] is before:
                holder[key] = after


def taken_again(name: str, why: str, remedy: str = "") -> CutError:
    """Code that takes from an attribute of the module's own does not run once for each micro-batch on one rank.

    Args:
        name: of the attribute.
        why: it does not, in words that follow "and".
        remedy: what would let it, in words that follow "or use".
    """
    return CutError(
        f"the step draws from a random generator or an iterator of its own, 'self.{name}', and {why}.",
        hint=f"{_HINT} Or use {remedy}." if remedy else _HINT,
    )
