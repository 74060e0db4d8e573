"""Which control words go unsaid, where they travel by the host: those that were the same in many batches.

A host that waits for words waits until the other host has come to that message. So both ends of a hop, one direction
between two stages, keep its words, and the first message of a batch says how it is with the others::

    ENOUGH equal batches     words | words | words | words
    from then on             words, the others as before
    the first one differs    words | words | words | words      and so in ENOUGH equal batches again
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_pipe.errors import CutError
from lightning_pipe.transport.base import Words

ENOUGH = 32
"""So many batches that are like the one before them, and the next one is taken to be so."""
TELL_ALL = "LIGHTNING_PIPE_TELL_ALL"


@dataclass
class Hop:
    """The words of one hop for batches of one kind, at one of its ends. The sender decides.

    Args:
        kept: those of the last batch, by micro-batch; at the sender without those that may change any time.
        said: those of the batch under way.
        equal: how many batches in a row were like the one before; minus infinity once words changed within a batch.
        quiet: whether words go unsaid in this batch; ``None`` before it is known.
        first: the micro-batch whose message begins this batch, at the receiver, and what waits for its words.
    """

    kept: dict[int, Words] = field(default_factory=dict)
    said: dict[int, Words] = field(default_factory=dict)
    equal: float = 0.0
    quiet: bool | None = None
    first: tuple[int, Callable[[], Words]] | None = None

    def say(self, micro_batch: int, words: Words, steady: bool) -> Words | None:
        """What the sender says of a message, with `quiet` behind; ``steady``: its words may go unsaid.

        Raises:
            CutError: they are others than the receiver takes them for.
        """
        same = steady and words == self.kept.get(micro_batch)
        self.said[micro_batch] = words if steady else []
        if self.quiet is None:
            self.quiet = same and self.equal >= ENOUGH and TELL_ALL not in os.environ
        elif self.quiet and not same:
            raise CutError(
                f"micro-batch {micro_batch} takes another path, or brings back other gradients, than in the last "
                f"{ENOUGH} batches and more; the first one of this batch did not, and ranks tell it there alone.",
                hint=f"Set {TELL_ALL}=1 in the environment: ranks tell it each time. Or let the whole batch decide it.",
            )
        elif self.quiet:
            return None
        return [*words, self.quiet]

    def expect(self, micro_batch: int, receive: Callable[[], Words]) -> Callable[[], Words]:
        """Post a message, in the order of the sends. Returns what gets its words, by ``receive`` if they are said."""

        def hear() -> Words:
            if self.quiet is None and self.first is not None:
                begun, begin = self.first
                *self.said[begun], quiet = begin()
                self.quiet = bool(quiet)
            if micro_batch not in self.said:
                self.said[micro_batch] = self.kept[micro_batch] if self.quiet else receive()[:-1]
            return self.said[micro_batch]

        self.first = self.first or (micro_batch, receive)
        return hear

    def end(self) -> None:
        """End a batch."""
        for begun, words in [*self.said.items()][:1]:
            same, within = self.said == self.kept and all(self.said.values()), words == self.kept.get(begun)
            self.equal = self.equal + 1 if same else min(self.equal, -math.inf if within else 0.0)
            self.kept = self.said
        self.said, self.quiet, self.first = {}, None, None
