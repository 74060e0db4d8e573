"""What one rank keeps between its actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_pipe.engine.stage import Kept, Saved
from lightning_pipe.intercept.crossing import Crossing, Returned
from lightning_pipe.schedules import Action, Kind

_STAGES = 1024
_AT_ONCE = 128


class StageKey(NamedTuple):
    """One stage and one micro-batch."""

    pipe: int
    stage: int
    micro_batch: int

    @classmethod
    def of(cls, action: Action) -> StageKey:
        """Those of an action."""
        return cls(action.pipe, action.stage, action.micro_batch or 0)


class BoundaryKey(NamedTuple):
    """One micro-batch on its way from a stage to a later one, mostly the next, on its pipe."""

    pipe: int
    stage: int
    micro_batch: int
    to: int

    @classmethod
    def of(cls, message: Action) -> BoundaryKey:
        """The boundary that a message crosses; the next stage is at the other end if the message does not name it."""
        step = 1 if message.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
        other = message.stage + step if message.other is None else message.other
        return cls(message.pipe, min(message.stage, other), message.micro_batch or 0, max(message.stage, other))

    def tag(self, channel: int) -> int:
        """That of its objects; those with the same tag keep their order, so that numbers may come again."""
        return ((self.micro_batch % _AT_ONCE * _STAGES + self.stage) * _STAGES + self.to) * 3 + channel


@dataclass
class UnderWay:
    """What micro-batches that have begun and not ended have left on this rank.

    Each entry is put down by one action and taken up by another; see the drawing of `Executor`.

    Attributes:
        kept: what the first run of a forward pass has left that runs again: its input.
        saved: what a forward pass has left for its backward pass: its graph.
        arrived: for a stage with several senders, which numbers came from which stage; their gradients go back there.
        left: what has left a stage for a later one, by a message or on this rank.
        gradients: what is to go back to an earlier stage, by a message or on this rank.
        peak_held: the most forward passes that waited for their backward pass at any time of the last batch.
    """

    kept: dict[StageKey, Kept] = field(default_factory=dict)
    saved: dict[StageKey, Saved] = field(default_factory=dict)
    arrived: dict[StageKey, dict[int, frozenset[int]]] = field(default_factory=dict)
    left: dict[BoundaryKey, Crossing] = field(default_factory=dict)
    gradients: dict[BoundaryKey, Returned] = field(default_factory=dict)
    peak_held: int = 0

    def save(self, here: StageKey, saved: Saved) -> None:
        """Keep what a forward pass has left until its backward pass is done."""
        self.saved[here] = saved
        self.peak_held = max(self.peak_held, len(self.saved))

    def clear(self) -> None:
        """Drop everything: a batch has failed, and its graphs must not stay in memory."""
        for entries in (self.kept, self.saved, self.arrived, self.left, self.gradients):
            entries.clear()
