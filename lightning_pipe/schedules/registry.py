"""Schedules by name, object or file; users register their own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TypeVar

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.family import Family, Orders
from lightning_pipe.schedules.ir import Schedule

Factory = TypeVar("Factory", bound=Callable[..., object])
_families: dict[str, Callable[..., Family]] = {}
# what other packages and papers call these schedules: our name, and the options that make it theirs
ALIASES: dict[str, tuple[str, dict[str, object]]] = {
    "dapple": ("1f1b", {}),
    "pipedream_flush": ("1f1b", {}),
    "1f1b_flush": ("1f1b", {}),
    "f_then_b": ("gpipe", {}),
    "virtual_pipeline": ("interleaved", {}),
    "interleaved_1f1b": ("interleaved", {}),
    "interleaved1f1b": ("interleaved", {}),
    "loopedbfs": ("looped_bfs", {}),
    "interleavedzerobubble": ("interleaved_zero_bubble", {}),
    "zbvzerobubble": ("zero_bubble", {"variant": "v"}),
    "zbv": ("zero_bubble", {"variant": "v"}),
    "zero_bubble_v": ("zero_bubble", {"variant": "v"}),
    "vhalf": ("zero_bubble", {"variant": "v_half"}),
    "vmin": ("zero_bubble", {"variant": "v_min"}),
}


def register(name: str) -> Callable[[Factory], Factory]:
    """Register a schedule under a name: a :class:`Family`, or a function from ranks and micro-batches to orders.

    Args:
        name: what `PipeStrategy(schedule=…)`, `get` and the command line know it by. A known name is replaced.

    Returns:
        A decorator that returns what it decorates.

    Example:
        >>> from lightning_pipe.schedules import Action, Kind, get, register
        >>> @register("gpipe_in_order")
        ... def gpipe_in_order(ranks, micro_batches):
        ...     kinds, indices = (Kind.FORWARD, Kind.BACKWARD), range(micro_batches)
        ...     return [[Action(kind, rank, i) for kind in kinds for i in indices] for rank in range(ranks)]
        >>> print(*get("gpipe_in_order").build(ranks=2, micro_batches=2).actions[1])
        1F0 1F1 1B0 1B1
    """

    def decorate(factory: Factory) -> Factory:
        if isinstance(factory, type) and issubclass(factory, Family):
            _families[name] = factory
        else:
            _families[name] = lambda **options: FromFunction(name, factory, tuple(options.items()))  # type: ignore[arg-type]
        return factory

    return decorate


def names() -> tuple[str, ...]:
    """The registered names, in the order of their registration."""
    return tuple(_families)


def get(schedule: str | PathLike[str] | Family | Schedule, **options: object) -> Family:
    """The schedule family of a name, an object or a CSV file.

    Args:
        schedule: a registered name or one of its `ALIASES`, a family, a finished schedule, or the path of a CSV file.
        options: the family's options, with a name only.

    Raises:
        ScheduleError: no such name, file or option.

    Example:
        >>> get("chimera", pipes=4)
        Chimera(pipes=4, scaling='direct', sync='eager_opt')
    """
    if isinstance(schedule, Family):
        return schedule
    if isinstance(schedule, Schedule):
        return Fixed(schedule)
    name = fspath(schedule)
    if name.lower().endswith(".csv"):
        from lightning_pipe.schedules.csv_format import read_csv

        return Fixed(read_csv(Path(name)))
    lower = name.lower()
    factory = _families.get(name) or _families.get(lower)
    if factory is None and lower in ALIASES:
        ours, preset = ALIASES[lower]
        other = next((option for option in preset if options.get(option, preset[option]) != preset[option]), None)
        if other is not None:
            raise ScheduleError(
                f"Schedule {name!r} is {ours!r} with {other}={preset[other]!r}, got {other}={options[other]!r}.",
                hint=f"Use schedule={ours!r} with this option, or {name!r} without it.",
            )
        factory, options = _families[ours], preset | options
    if factory is None:
        near = difflib.get_close_matches(lower, [*_families, *ALIASES], n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Use one of these, or the path of a .csv file."
        if lower == "auto":
            hint = "Use what `lightning-pipe search` finds (PipeStrategy(**search(…).best.options)), or '1f1b'."
        raise ScheduleError(f"There is no schedule {name!r}; known are {', '.join(map(repr, _families))}.", hint=hint)
    known = inspect.signature(factory).parameters
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f"{f'Did you mean {near[0]}? ' if near else ''}It has {', '.join(known) or 'no options'}."
        raise ScheduleError(f"Schedule {name!r} has no option {unknown!r}.", hint=hint)
    try:
        return factory(**options)
    except TypeError as error:
        raise ScheduleError(f"Schedule {name!r} does not take these options: {error}.") from error


@dataclass(frozen=True)
class FromFunction(Family):
    """A family made of a function ``(ranks, micro_batches, **options) -> orders`` with one stage per rank."""

    title: str
    function: Callable[..., Orders]
    arguments: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """The registered name."""
        return self.title

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """What the function returns."""
        return self.function(ranks, micro_batches, **dict(self.arguments))

    def options(self) -> dict[str, object]:
        """The arguments of the function."""
        return dict(self.arguments)


@dataclass(frozen=True)
class Fixed(Family):
    """A finished schedule as a family: itself, for more micro-batches repeated, for fewer cut short."""

    schedule: Schedule

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.schedule.name

    @property
    def label(self) -> str:
        """The schedule's name."""
        return self.schedule.name

    @property
    def pipes(self) -> int:
        """The schedule's own."""
        return self.schedule.pipes

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """The schedule's own ranks and stages; more stages are folded onto it."""
        own = self.schedule
        if ranks != own.ranks:
            raise ScheduleError(
                f"Schedule {own.name!r} is made for {own.ranks} ranks, got ranks={ranks}.",
                hint=f"Use {own.ranks} ranks, or a schedule family by name.",
            )
        if stages is not None and stages < own.stages:
            raise ScheduleError(
                f"Schedule {own.name!r} is made for {own.stages} stages, got stages={stages}.",
                hint=f"Use stages={own.stages} or more.",
            )
        return self, own.stages

    def published(self, ranks: int, micro_batches: int) -> int:
        """Multiples of the schedule's own number."""
        own = self.schedule.micro_batches
        return -(-micro_batches // own) * own

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """The schedule's own orders, as often as needed one after the other."""
        own = self.schedule
        return [
            [
                action._replace(micro_batch=first + (action.micro_batch or 0))
                for first in range(0, micro_batches, own.micro_batches)
                for action in order
            ]
            for order in own.actions
        ]

    def options(self) -> dict[str, object]:
        """The schedule's options."""
        return dict(self.schedule.options)
