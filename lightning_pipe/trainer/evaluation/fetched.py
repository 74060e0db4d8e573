"""The batches of an evaluation that have been fetched, of which ranks run the steps before the loop comes to them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from lightning_pipe.trainer.user_step import StepOfBatch


@dataclass
class Fetched:
    """A batch that has been fetched.

    Args:
        number: over all loaders, from 0.
        batch: the batch, on this device.
        index: its number in its loader.
        loader: the number of that.
        last: whether the fetcher knew that it is the last one.
        step: its step, if this rank has begun it.
        way: the same on its way through the engine.
    """

    number: int
    batch: Any
    index: int
    loader: int
    last: bool
    step: StepOfBatch | None = None
    way: Any = None


class FetchedBatches:
    """Fetches batches before the loop asks for them, and knows what the loop will do with them.

    Args:
        trainer: the Trainer.
        loop: Lightning's loop, about to fetch its first batch.
        name: the method that evaluates a batch.

    Attributes:
        loop, name: as given.
        fetcher: that of the loop.
        current: the batch that the loop has got.
    """

    def __init__(self, trainer: Any, loop: Any, name: str) -> None:
        self._trainer, self.loop, self.name = trainer, loop, name
        self.fetcher = loop._data_fetcher
        self._queue: deque[Fetched] = deque()
        self._fetched = 0
        self._end: Exception | None = None
        self.current: Fetched | None = None

    @property
    def given(self) -> int:
        """The number of batches that the loop has got."""
        return self._fetched - len(self._queue)

    @property
    def begun(self) -> bool:
        """Whether the fetcher has been asked, and has a batch or an error that the loop is to get."""
        return self._fetched > 0 or self._end is not None

    def up_to(self, number: int) -> None:
        """Fetch all batches up to one, if there are so many."""
        while self._end is None and self._fetched <= number:
            try:
                batch, index, loader = next(self.fetcher)
                # as the loop does it, which then finds nothing to move
                batch = self._trainer.precision_plugin.convert_input(batch)
                batch = self._trainer.strategy.batch_to_device(batch, dataloader_idx=loader)
            except Exception as end:  # also that of the loader: hooks of earlier batches come first, as on one device
                self._end = end
                return
            self._queue.append(Fetched(self._fetched, batch, index, loader, self.fetcher.done))
            self._fetched += 1

    def find(self, number: int) -> Fetched | None:
        """A batch that the loop has not got, or its current one; ``None`` if there are not so many."""
        if self.current is not None and number == self.current.number:
            return self.current
        self.up_to(number)
        return self._queue[number - self.given] if number < self._fetched else None

    def give(self) -> Fetched:
        """The next batch for the loop.

        Raises:
            Exception: that of the fetcher, if there is none.
        """
        self.up_to(self.given)
        if not self._queue:
            assert self._end is not None
            raise self._end
        self.current = self._queue.popleft()
        return self.current

    def arguments(self, fetched: Fetched) -> tuple[Any, ...]:
        """What the loop will pass to the step of a batch."""
        loop = self.loop
        several = loop.num_dataloaders > 1 and (self.name == "predict_step" or loop._is_sequential)
        known = loop._build_kwargs(fetched.batch, fetched.index, fetched.loader if several else None)
        arguments: tuple[Any, ...] = loop._build_step_args_from_hook_kwargs(known, self.name)
        return arguments
