"""The loader's iterator, for evaluation steps that fetch their batch themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_pipe.errors import ConfigurationError


class LoaderIterator:
    """Fetches for a step what the step takes, before any run of it.

    A rank runs the step once for each of its stages, and the rank with the last stage, which loads, begins when the
    stages before it have run. So a run must neither fetch a batch of its own nor wait for one.

    Args:
        iterator: Lightning's ``dataloader_iter``.

    Example:
        >>> batches = LoaderIterator(iter([("a", 0, 0), ("b", 1, 0)]))
        >>> batches.fetch()
        >>> [next(batches.of_run()) for _ in range(2)]
        [('a', 0, 0), ('a', 0, 0)]
        >>> batches.fetch()
        >>> next(batches.of_run())
        ('b', 1, 0)
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self._item: Any = None
        self._taken = True

    def __deepcopy__(self, memo: object) -> LoaderIterator:
        return self  # a batch, of which runs get copies, and this is for all of them

    def fetch(self) -> None:
        """Fetch the batch of the next step, if that of the last one was taken. On all ranks alike.

        Raises:
            StopIteration: there is none.
        """
        if self._taken:
            self._item, self._taken = next(self.iterator), False

    def of_run(self) -> Iterator[Any]:
        """What a run of the step gets as ``dataloader_iter``."""
        return _OfRun(self)

    def take(self) -> Any:
        """The batch that was fetched."""
        self._taken = True
        return self._item


class _OfRun(Iterator[Any]):
    """Gives one batch; everything else is that of Lightning's iterator."""

    def __init__(self, batches: LoaderIterator) -> None:
        self._batches, self._ended = batches, False

    def __next__(self) -> Any:
        if self._ended:
            raise ConfigurationError(
                "A step takes a second batch from its dataloader_iter; on a pipeline it takes one in each call.",
                hint="Take the batch as an argument, (batch, batch_idx), or give the loader larger batches.",
            )
        self._ended = True
        return self._batches.take()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches.iterator, name)
