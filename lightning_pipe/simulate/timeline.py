"""Who computed what, when: one type for simulated and measured timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from os import PathLike
from typing import NamedTuple

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import COMPUTE, Action, Kind
from lightning_pipe.schedules.dependencies import Number, held

# Measured times never repeat exactly; sums of floats almost do.
_TOLERANCE = {"": 1e-9, "s": 0.2}


class Event(NamedTuple):
    """One action with its start and end; ``rank`` is the row of the schedule that it belongs to."""

    rank: int
    kind: Kind
    stage: int
    micro_batch: int | None
    pipe: int
    start: Number
    end: Number

    @property
    def action(self) -> Action:
        """The action."""
        return Action(self.kind, self.stage, self.micro_batch, self.pipe)


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks, ordered by rank and start; make one with :meth:`of`.

    Compute (forward, backward and its parts, recompute, optimizer steps) is what keeps a rank busy; other events,
    such as reductions, are drawn and count for the makespan alone.

    Args:
        events: the events.
        ranks: number of ranks.
        title: what ran.
        unit: ``""`` for a simulation, ``"s"`` where times are seconds.
        global_ranks: of a measured run: for each row the rank of its process.
        synchronous: a batch ends with a flush; without one a run fills and drains once, not once for each batch.
        steady: without a flush: the bubble ratio of the steady state, if it is known.
    """

    events: tuple[Event, ...]
    ranks: int
    title: str = ""
    unit: str = ""
    global_ranks: tuple[int, ...] = ()
    synchronous: bool = True
    steady: Number | None = None

    @classmethod
    def of(
        cls,
        events: Iterable[Event | Sequence[object]],
        *,
        ranks: int | None = None,
        title: str = "",
        unit: str = "",
        global_ranks: Sequence[int] = (),
    ) -> Timeline:
        """Make a timeline of events in any order; the earliest start becomes time zero.

        Args:
            events: events, or tuples ``(rank, kind, stage, micro_batch, pipe, start, end)``.
            ranks: number of ranks; by default as many as have events.
            title: what ran.
            unit: ``"s"`` for measured times in seconds (all ranks by the same clock).
            global_ranks: of a measured run: for each row the rank of its process, as Lightning counts them.

        Raises:
            ScheduleError: there are no events, or one ends before it starts.

        Example:
            >>> measured = [(0, "F", 0, 0, 0, 7.25, 7.5), (0, "B", 0, 0, 0, 7.75, 8.25)]
            >>> timeline = Timeline.of(measured, title="one rank", unit="s")
            >>> timeline.makespan, timeline.bubble_ratio
            (1.0, 0.25)
        """
        made = [event if isinstance(event, Event) else Event(*event) for event in events]  # type: ignore[arg-type]
        if not made:
            raise ScheduleError("A timeline needs at least one event.")
        zero = min(event.start for event in made)
        if zero or not all(isinstance(event.kind, Kind) for event in made):
            made = [
                event._replace(kind=Kind(event.kind), start=event.start - zero, end=event.end - zero) for event in made
            ]
        for event in made:
            if event.end < event.start:
                late = event.start - event.end
                raise ScheduleError(f"{event.action} in row {event.rank} ends {late} before it starts.")
        made.sort(key=lambda event: (event.rank, event.start))
        return cls(tuple(made), ranks or 1 + made[-1].rank, title, unit, tuple(global_ranks))

    @cached_property
    def makespan(self) -> Number:
        """Time from the first start to the last end, in the unit of the costs, or in seconds."""
        return max(event.end for event in self.events)

    @cached_property
    def compute(self) -> tuple[tuple[Event, ...], ...]:
        """For every rank the events that keep it busy."""
        rows: list[list[Event]] = [[] for _ in range(self.ranks)]
        for event in self.events:
            if event.kind in COMPUTE:
                rows[event.rank].append(event)
        return tuple(map(tuple, rows))

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """For every rank the time it computes."""
        return tuple(sum(event.end - event.start for event in row) for row in self.compute)

    @cached_property
    def bubble_ratio(self) -> Number:
        """Idle time of the ranks / (ranks x makespan): a share of the whole time, from 0 to 1."""
        whole = self.ranks * self.makespan
        return ratio(whole - sum(self.busy), whole)

    @cached_property
    def steady_bubble_ratio(self) -> Number:
        """Idle part of what repeats in the middle third of a long timeline; of all of it if nothing does.

        A period is a number of micro-batches after which every action comes again, all after the same time.
        """
        if self.steady is not None:
            return self.steady
        by_micro_batch: dict[int, dict[tuple[object, ...], Event]] = defaultdict(dict)
        for event in chain.from_iterable(self.compute):
            if event.micro_batch is not None:
                by_micro_batch[event.micro_batch][event.rank, event.kind, event.stage, event.pipe] = event
        count = len(by_micro_batch)
        first, last = count // 3, count - count // 3
        for shift in range(1, (last - first) // 2 + 1):
            period = _period(by_micro_batch, range(first, last - shift), shift, _TOLERANCE[self.unit])
            if period is not None:
                repeated = (by_micro_batch[micro_batch].values() for micro_batch in range(first, first + shift))
                work = sum(event.end - event.start for event in chain.from_iterable(repeated))
                whole = self.ranks * period
                return ratio(whole - work, whole)
        return self.bubble_ratio

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For every rank the most stage-micro-batches whose activations it holds at once.

        From the forward to the last backward action; where activations are recomputed, from the recomputation on.
        """
        return tuple(held([event.action for event in row] for row in self.compute))

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the timeline into a picture; the file's ending says the format (png, svg, pdf).

        Args:
            path: the file.

        Raises:
            ValueError: matplotlib does not know the format.
            OSError: the file cannot be written.
        """
        from lightning_pipe.simulate.plot import plot

        plot(self, path)

    def __str__(self) -> str:
        from lightning_pipe.simulate.terminal import draw

        return draw(self)


def _period(
    by_micro_batch: dict[int, dict[tuple[object, ...], Event]], starts: range, shift: int, tolerance: float
) -> Number | None:
    """The time between the actions of micro-batches ``shift`` apart, if it is the same for all of them."""
    gaps: list[Number] = []
    for micro_batch in starts:
        here, there = by_micro_batch[micro_batch], by_micro_batch[micro_batch + shift]
        if here.keys() != there.keys():
            return None
        gaps += [there[key].start - event.start for key, event in here.items()]
    low, high = min(gaps), max(gaps)
    if low <= 0 or high - low > tolerance * low:
        return None
    return low if low == high else sum(gaps) / len(gaps)


def ratio(part: Number, whole: Number) -> Number:
    """``part / whole``, exact if both are."""
    if not whole:
        return 0
    return part / whole if isinstance(part, float) or isinstance(whole, float) else Fraction(part) / whole
