"""From recorded events to programs under one choice of the rules that NCCL and torch leave open.

A process has a host, a stream that computes, and one stream for each communicator::

    host       launch  launch  wait for host messages  launch ...      in order; runs ahead of the device
    compute    kernel | wait for a kernel of a communicator | kernel   in order
    comm. A    send ----> resident until its receive is resident        in order; begins after what `compute`
    comm. B    all-reduce -> resident until all members' are            held when it was launched
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

from tests.support.nccl.events import Computed, Event, Issued, Made, Read, Waited


class Rules(NamedTuple):
    """What differs between releases, settings and devices.

    Args:
        unbatched: the communicator of a message outside ``batch_isend_irecv``: one for the pair of ranks (torch without
            ``device_id``), or that of the whole group.
        creation: whether a group's communicator is made with the group or by its first operation. That of a pair is
            always made by its first message. Making one holds the host until all its members do.
        host: whether the host runs ahead of its kernels, or waits for each of them, as a step that reads values does.
    """

    unbatched: Literal["pair", "group"] = "pair"
    creation: Literal["lazy", "eager"] = "lazy"
    host: Literal["ahead", "waits"] = "ahead"


ALL_RULES = tuple(
    Rules(unbatched, creation, host)
    for unbatched, creation, host in product(("pair", "group"), ("lazy", "eager"), ("ahead", "waits"))
)
"""Every choice, on devices that hold any number of kernels."""


class Arrive(NamedTuple):
    """The host is at a place where others meet it; it goes on."""

    place: Hashable


class Meet(NamedTuple):
    """The host waits until other processes have arrived at a place."""

    place: Hashable
    processes: tuple[int, ...]


class Launch(NamedTuple):
    """The host launches the next kernel of a stream."""

    stream: int


class Compute(NamedTuple):
    """The host launches a kernel on the stream that computes."""

    action: str


class Join(NamedTuple):
    """The stream that computes waits for a kernel of another stream."""

    stream: int
    index: int


class Drain(NamedTuple):
    """The host waits until the stream that computes is empty."""


Instruction = Arrive | Meet | Launch | Compute | Join | Drain


class Kernel(NamedTuple):
    """A kernel of NCCL.

    Args:
        match: the same for the kernels that end together.
        members: the processes that have one of them.
        gate: how many entries of the stream that computes must be done before it.
        what: how reports name it.
    """

    match: Hashable
    members: tuple[int, ...]
    gate: int
    what: str


@dataclass
class Program:
    """What one process does. ``host`` is in its order; so is each of the streams."""

    host: list[Instruction] = field(default_factory=list)
    computing: list[Compute | Join] = field(default_factory=list)
    streams: list[list[Kernel]] = field(default_factory=list)


def programs(recorded: Sequence[Sequence[Event]], rules: Rules) -> list[Program]:
    """The programs of all processes.

    Raises:
        AssertionError: operations that meet each other have different sizes or contents.
    """
    built = [_Builder(process, len(recorded), rules) for process in range(len(recorded))]
    for builder, events in zip(built, recorded, strict=True):
        for event in events:
            builder.take(event)
    shapes: dict[Hashable, Hashable] = {}
    for builder in built:
        for match, shape in builder.shapes.items():
            assert shapes.setdefault(match, shape) == shape, f"{match}: {shape} meets {shapes[match]}"
    return [builder.program for builder in built]


class _Builder:
    def __init__(self, process: int, processes: int, rules: Rules) -> None:
        self.process, self.everyone, self.rules = process, tuple(range(processes)), rules
        self.program = Program()
        self.shapes: dict[Hashable, Hashable] = {}
        self._counts: Counter[Hashable] = Counter()
        self._streams: dict[Hashable, int] = {}
        self._waits: dict[int, Meet | Join] = {}

    def take(self, event: Event) -> None:
        match event:
            case Made(group):
                if group.backend == "nccl" and self.process in group.members and self.rules.creation == "eager":
                    self._stream(("group", group), group.members)
                self._meet(("new_group", group.number), self.everyone)
            case Issued():
                self._issue(event)
            case Waited(number):
                wait = self._waits[number]
                self.program.host.append(wait)
                if isinstance(wait, Join):
                    self.program.computing.append(wait)
            case Computed(action):
                self.program.host.append(Compute(action))
                self.program.computing.append(Compute(action))
                if self.rules.host == "waits":
                    self.program.host.append(Drain())
            case Read():
                self.program.host.append(Drain())

    def _issue(self, event: Issued) -> None:
        ends, members = self._ends(event)
        if event.group.backend != "nccl":
            place = self._numbered((event.group, event.tag, *ends))
            self.shapes[place] = event.size
            self.program.host.append(Arrive(place))
            self._waits[event.number] = Meet(place, tuple(m for m in members if m != self.process))
            return
        pair = event.peer is not None and self.rules.unbatched == "pair"
        communicator = ("pair", event.group, members) if pair else ("group", event.group)
        stream = self._stream(communicator, members if pair else event.group.members)
        match = self._numbered((communicator, *ends))
        # collectives that differ would wait for each other, or add what does not belong together
        self.shapes[match] = (event.size, event.content, event.verb if event.peer is None else None)
        what = f"{event.verb} {event.size} bytes among {list(members)} in group {event.group.number}"
        kernels = self.program.streams[stream]
        kernels.append(Kernel(match, members, len(self.program.computing), what))
        self.program.host.append(Launch(stream))
        self._waits[event.number] = Join(stream, len(kernels) - 1)

    def _ends(self, event: Issued) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
        """What an operation has in common with those that it meets, and the processes of all of them."""
        if event.peer is None:
            return (event.verb,) if event.group.backend != "nccl" else (), event.group.members
        ends = (self.process, event.peer) if event.verb == "send" else (event.peer, self.process)
        return ends, (min(ends), max(ends))

    def _numbered(self, key: Hashable) -> tuple[Hashable, int]:
        self._counts[key] += 1
        return key, self._counts[key]

    def _stream(self, communicator: Hashable, members: tuple[int, ...]) -> int:
        """The stream of a communicator, which is made if it is new."""
        if communicator not in self._streams:
            self._streams[communicator] = len(self.program.streams)
            self.program.streams.append([])
            self._meet(("communicator", communicator), members)
        return self._streams[communicator]

    def _meet(self, place: Hashable, processes: tuple[int, ...]) -> None:
        self.program.host += [Arrive(place), Meet(place, tuple(p for p in processes if p != self.process))]
