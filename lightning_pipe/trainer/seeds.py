"""The seeds of a run's random streams."""

from __future__ import annotations

from lightning_pipe.intercept.random_streams import mix

_TRAINING, _EVALUATION, _TRANSFER = range(3)


class Seeds:
    """Derives all seeds of a run from one, so that all ranks of a pipeline draw the same numbers.

    Args:
        seed: the seed of the run.
        replica: the number of this process's pipeline.
    """

    def __init__(self, seed: int, replica: int) -> None:
        self._seed, self._replica = seed, replica
        self._counts = {_EVALUATION: 0, _TRANSFER: 0}

    def training(self, batch: int) -> int:
        """The seed of a training batch; the engine's streams depend on the replica besides."""
        return mix(self._seed, _TRAINING, batch)

    def evaluation(self) -> int:
        """The seed of the next evaluation batch."""
        return self._next(_EVALUATION)

    def transfer(self) -> int:
        """The seed of the next transfer of a batch to the device."""
        return self._next(_TRANSFER)

    def _next(self, purpose: int) -> int:
        self._counts[purpose] += 1
        return mix(self._seed, purpose, self._counts[purpose], self._replica)
