"""The base of every schedule family: options in, :class:`Schedule` out, for any ranks, micro-batches and stages."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, zip_longest
from numbers import Integral
from typing import ClassVar

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind, Placement, blocks, joined
from lightning_pipe.schedules.dependencies import steps_before_forwards
from lightning_pipe.schedules.ir import Schedule

Orders = Sequence[Sequence[Action]]
"""For every rank its compute actions in order."""


@dataclass(frozen=True)
class Family(ABC):
    """A family of schedules; its fields are the family's options.

    A family says in :meth:`orders` what every rank computes if the model is cut into ``ranks * stages_per_rank``
    stages, and in :meth:`published` for how many micro-batches. :meth:`build` does the rest: any number of
    micro-batches, and more stages by folding, so that a rank holds several consecutive stages in the place of one.

    Example:
        >>> from dataclasses import dataclass
        >>> from lightning_pipe.schedules import Action, Family, Kind
        >>> @dataclass(frozen=True)
        ... class ForwardThenBackward(Family):
        ...     name = "forward_then_backward"
        ...
        ...     def orders(self, ranks, micro_batches):
        ...         kinds, indices = (Kind.FORWARD, Kind.BACKWARD), range(micro_batches)
        ...         return [[Action(kind, rank, i) for kind in kinds for i in indices] for rank in range(ranks)]
        >>> schedule = ForwardThenBackward().build(ranks=2, micro_batches=2, stages=3)
        >>> print(*schedule.actions[0])
        0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
    """

    synchronous: ClassVar[bool] = True
    mirrored: ClassVar[bool] = False
    """Ranks stand in pairs that mirror each other."""

    @property
    def name(self) -> str:
        """The name in drawings and messages; families write ``name = "…"``."""
        return type(self).__name__

    @property
    def stages_per_rank(self) -> int:
        """Stages that each rank holds by default."""
        return 1

    @property
    def pipes(self) -> int:
        """Routes that micro-batches take through the ranks in turn."""
        return 1

    @property
    def label(self) -> str:
        """The name, and the options that are not the default."""
        own = type(self)
        changed = (f"{name}={value}" for name, value in self.options().items() if value != getattr(own, name, None))
        return " ".join([self.name, *changed])

    def variants(self) -> tuple[Family, ...]:
        """The family with all options that a comparison of schedules shows."""
        return (self,)

    @abstractmethod
    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """What every rank computes, in order, with ``ranks * stages_per_rank`` stages.

        Args:
            ranks: number of ranks.
            micro_batches: a number that :meth:`published` has returned.
        """

    def published(self, ranks: int, micro_batches: int) -> int:
        """The smallest number of micro-batches, not less than asked for, for which the family has an order.

        For other numbers :meth:`build` leaves the last micro-batches of that order out. This can never deadlock, as
        no micro-batch waits for another, and keeps the family's limits of time and memory.
        """
        return micro_batches

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """The family with options that suit the number of stages asked for, and the number that its orders have.

        Raises:
            ScheduleError: too few stages, or ranks that cannot be paired.
        """
        if self.mirrored and ranks % 2:
            raise ScheduleError(
                f"Schedule {self.label!r} pairs ranks that mirror each other, got ranks={ranks}.",
                hint="Use an even number of ranks.",
            )
        needed = ranks * self.stages_per_rank
        if stages is not None and stages < needed:
            raise ScheduleError(
                f"Schedule {self.label!r} on {ranks} ranks needs at least {needed} stages "
                f"({self.stages_per_rank} per rank), got stages={stages}.",
                hint=f"Use stages={needed} or more, or {max(1, stages // self.stages_per_rank)} ranks or fewer.",
            )
        return self, needed

    def for_batches_of(self, micro_batches: int) -> Family:
        """The family for batches of so many micro-batches, where its orders depend on that: without a flush.

        Args:
            micro_batches: what a batch is to be cut into.
        """
        return self

    def versions(self, schedule: Schedule) -> Mapping[tuple[int, int], int]:
        """For :attr:`Schedule.versions`; by default each stage's newest."""
        return schedule.versions

    def options(self) -> dict[str, object]:
        """The options to show."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    def build(self, ranks: int, micro_batches: int, stages: int | None = None) -> Schedule:
        """Build the schedule.

        Args:
            ranks: number of ranks in one pipeline, 1 or more.
            micro_batches: number of micro-batches in a batch, 1 or more.
            stages: number of stages the model is cut into, at least as many as the family needs; by default
                ``ranks * stages_per_rank``.

        Raises:
            ScheduleError: the numbers do not fit together.
        """
        schedule = self.unchecked(ranks, micro_batches, stages)
        schedule.validate()
        return schedule

    def unchecked(self, ranks: int, micro_batches: int, stages: int | None = None) -> Schedule:
        """As `build`, for who looks at many schedules and runs none of them."""
        given = {} if stages is None else {"stages": stages}
        check_counts(f"Schedule {self.label!r}", ranks=ranks, micro_batches=micro_batches, **given)
        family, coarse = self.placed(ranks, stages)
        whole = family.published(ranks, micro_batches)
        if whole != micro_batches:
            warnings.warn(
                f"Schedule {self.label!r} has no order of its own for {micro_batches} micro-batches on {ranks} ranks; "
                f"they run in the order for {whole}, cut short.",
                stacklevel=2,
            )

        def folded(number: int) -> list[list[Action]]:
            return fold(family.orders(ranks, family.published(ranks, number)), coarse, stages or coarse)

        # Enough micro-batches for every pipe, so that the placement never depends on their number.
        all_pipes = folded(max(micro_batches, family.pipes))
        orders = all_pipes if micro_batches >= family.pipes else folded(micro_batches)
        if whole != micro_batches:
            orders = [
                [
                    action
                    for block in blocks(order)
                    for action in joined(each for each in block if (each.micro_batch or 0) < micro_batches)
                ]
                for order in orders
            ]
        schedule = schedule_of(
            family.name,
            orders,
            placement=placement_of(all_pipes),
            micro_batches=micro_batches,
            options=family.options(),
        )
        return replace(schedule, versions=family.versions(schedule))


def check_counts(who: str, **counts: object) -> None:
    """Raise a :class:`ScheduleError` unless every number is a whole one, 1 or more."""
    for what, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise ScheduleError(
                f"{who} needs {what} to be a whole number >= 1, got {what}={count!r}.", hint=f"Use {what}=1 or more."
            )


def check_choice(who: str, known: Sequence[object], **choices: object) -> None:
    """Raise a :class:`ScheduleError` unless every choice is one of the known ones."""
    for what, choice in choices.items():
        if choice not in known:
            raise ScheduleError(
                f"{who} needs {what} to be one of {', '.join(map(repr, known))}, got {what}={choice!r}."
            )


def placement_of(orders: Orders) -> Placement:
    """The rank of every stage in every pipe."""
    placement = {(action.pipe, action.stage): rank for rank, order in enumerate(orders) for action in order}
    return dict(sorted(placement.items()))


def schedule_of(
    name: str,
    orders: Orders,
    *,
    placement: Placement | None = None,
    micro_batches: int | None = None,
    options: dict[str, object] | None = None,
) -> Schedule:
    """Make a schedule of every rank's compute actions; what is not given follows from them.

    Where ranks step on their own there is no flush, and stages use their newest weights.
    """
    placement = placement or placement_of(orders)
    everything = [action for order in orders for action in order]
    if not everything:
        raise ScheduleError(f"Schedule {name!r} has no actions.")
    steps = any(action.kind is Kind.STEP for action in everything)
    return Schedule(
        name=name,
        stages=1 + max(stage for _, stage in placement),
        ranks=len(orders),
        micro_batches=micro_batches or 1 + max(action.micro_batch or 0 for action in everything),
        placement=placement,
        actions=tuple(tuple(order) for order in orders),
        forward_only=all(action.kind is Kind.FORWARD for action in everything),
        synchronous=not steps,
        options=options or {},
        versions=steps_before_forwards(orders) if steps else {},
    )


def fold(orders: Orders, coarse: int, stages: int) -> list[list[Action]]:
    """Replace each of ``coarse`` stages by a block of consecutive ones, so that there are ``stages`` in all.

    They are as equal as possible, larger ones first; a backward action runs through its stages from the end.
    """
    if coarse == stages:
        return [list(order) for order in orders]
    sizes = [stages // coarse + (index < stages % coarse) for index in range(coarse)]
    ends = list(accumulate(sizes))
    spans = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def folded(action: Action) -> list[Action]:
        forwards, span = (Kind.FORWARD, Kind.RECOMPUTE), spans[action.stage]
        return [action._replace(stage=stage) for stage in (span if action.kind in forwards else reversed(span))]

    return [
        [
            action
            for block in blocks(order)
            for column in zip_longest(*map(folded, block))
            for action in joined(filter(None, column))
        ]
        for order in orders
    ]
