"""What of the user's step is around the code that runs now: layers, hooks in them, checkpoints; its random stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

Stream = Callable[[], AbstractContextManager[None]]


class Surroundings:
    """What surrounds the code that runs now.

    Args:
        isolated: gives a context with the micro-batch's random stream of a key.

    Attributes:
        inside: whether a layer, an outside module or the engine's own code runs.
        checkpoint: of what the activation checkpoint runs the random streams, in order.
        inner_hook: whether a forward hook on a part of a layer runs.
    """

    def __init__(self, isolated: Callable[..., AbstractContextManager[None]]) -> None:
        self._isolated = isolated
        self.inside = False
        self.checkpoint: list[Stream] | None = None
        self.inner_hook = False

    def stream(self, *key: int) -> AbstractContextManager[None]:
        """The random stream of ``key``; without a key that of the code around, which goes on.

        A checkpoint runs its code again in the backward pass, so it notes the streams in order; hooks inside its layers
        run again as parts of these.
        """
        if self.checkpoint is None:
            return self._isolated(*key) if key else nullcontext()
        if self.inner_hook:
            return nullcontext()
        # Made anew by each call: the checkpoint enters it once now and once more in its second run.
        stream = partial(self._isolated, *key) if key else nullcontext
        self.checkpoint.append(stream)
        return stream()
