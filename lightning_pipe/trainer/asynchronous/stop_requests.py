"""``trainer.should_stop`` while ranks are at different batches: a request waits until the ranks have agreed on it."""

from __future__ import annotations

from typing import Any

from lightning_pipe.trainer.world import World


class StopRequests:
    """Withholds requests to stop from Lightning's loop until all ranks of the run stop after the same batch.

    Args:
        trainer: the Trainer.
        world: the processes.
    """

    def __init__(self, trainer: Any, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._agreed = self._withheld = False

    def withhold(self) -> None:
        """A rank that has been asked to stop must not leave the others, which do not know yet."""
        if self._trainer.should_stop and not self._agreed:
            self._withheld, self._trainer.should_stop = True, False

    def of_replicas(self) -> bool:
        """Whether this rank, which has the last stage, or its counterpart in another replica was asked. Collective."""
        return self._world.agree(self._take(), unanimous=False, members=self._world.replica_members)

    def agree(self) -> None:
        """Agree with all processes, when all of them are at the same batch. Collective over the world."""
        self.follow(self._world.agree(self._take(), unanimous=False))

    def follow(self, agreed: bool) -> None:
        """Stop, or go on, as the ranks have agreed."""
        self._agreed = self._trainer.should_stop = agreed

    def _take(self) -> bool:
        asked, self._withheld = self._withheld or self._trainer.should_stop, False
        return bool(asked)
