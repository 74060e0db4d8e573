"""All orders in which programs can run under the rules, by partial-order reduction; no samples.

A step of a host, an entry that the computing stream only waits for, and the end of kernels that are all resident are
*free*: once possible they stay possible, and they make no other step impossible. So is the start of a kernel on a
device that has room for all it may still hold at a time. Every deadlock can be reached by taking free steps first, in
any order: a set of one free step is persistent (Godefroid, Partial-Order Methods, LNCS 1032, chapter 4). Only starts
on devices that can fill up exclude each other; all of their orders are explored, each state once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tests.support.nccl.programs import Arrive, Compute, Drain, Join, Launch, Meet, Program

_COMPUTING = -1
"""In the place of a stream: the one that computes."""


class Outcome(NamedTuple):
    """What an exploration has found: the number of states with a choice and, if there is one, a deadlock."""

    states: int
    deadlock: str | None


class _State:
    """How far hosts and streams are, and which streams have a kernel on the device."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.host = [0] * len(programs)
        self.computed = [0] * len(programs)
        self.done = [[0] * len(program.streams) for program in programs]
        self.resident: list[frozenset[int]] = [frozenset()] * len(programs)

    def copy(self) -> _State:
        state = object.__new__(_State)
        state.host, state.computed = self.host[:], self.computed[:]
        state.done, state.resident = [done[:] for done in self.done], self.resident[:]
        return state

    def key(self) -> Hashable:
        return tuple(self.host), tuple(self.computed), tuple(map(tuple, self.done)), tuple(self.resident)


def explore(programs: Sequence[Program], resident: int | None = None, *, most: int = 200_000) -> Outcome:
    """Run programs in all orders.

    Args:
        programs: one for each process.
        resident: how many kernels a device can hold; ``None``: any number.
        most: the most states; an exploration that needs more fails, since it would show nothing.
    """
    rules = _Exploration(programs, resident)
    seen: set[Hashable] = set()
    open_states = [_State(programs)]
    while open_states:
        state = open_states.pop()
        rules.settle(state)
        key = state.key()
        if key in seen:
            continue
        seen.add(key)
        assert len(seen) <= most, f"more than {most} states: not explored"
        choices = list(rules.choices(state))
        if not choices and not rules.ended(state):
            return Outcome(len(seen), rules.report(state))
        for process, stream in choices:
            successor = state.copy()
            rules.start(successor, process, stream)
            open_states.append(successor)
    return Outcome(len(seen), None)


class _Exploration:
    """The steps that are possible in a state."""

    def __init__(self, programs: Sequence[Program], resident: int | None) -> None:
        self.programs, self.limit = programs, resident
        self.arrivals: list[dict[Hashable, int]] = []
        # for every stream the places in the host's program at which its kernels are launched
        self.launches: list[list[list[int]]] = []
        self.enqueued: list[list[int]] = []
        self.partners: defaultdict[Hashable, list[tuple[int, int, int]]] = defaultdict(list)
        for process, program in enumerate(programs):
            launches: list[list[int]] = [[] for _ in program.streams]
            arrivals, enqueued = {}, []
            for at, instruction in enumerate(program.host):
                match instruction:
                    case Arrive(place):
                        arrivals[place] = at
                    case Launch(stream):
                        launches[stream].append(at)
                    case Compute() | Join():
                        enqueued.append(at)
            self.arrivals.append(arrivals)
            self.launches.append(launches)
            self.enqueued.append(enqueued)
            for stream, kernels in enumerate(program.streams):
                for index, kernel in enumerate(kernels):
                    self.partners[kernel.match].append((process, stream, index))
        self.last_kernel = [
            max((at for at, entry in enumerate(program.computing) if isinstance(entry, Compute)), default=-1)
            for program in programs
        ]

    def settle(self, state: _State) -> None:
        """Take free steps until there are none."""
        moved = True
        while moved:
            moved = False
            for process in range(len(self.programs)):
                while self._advance(state, process):
                    moved = True

    def ended(self, state: _State) -> bool:
        return all(
            state.host[p] == len(program.host)
            and state.computed[p] == len(program.computing)
            and state.done[p] == [len(kernels) for kernels in program.streams]
            for p, program in enumerate(self.programs)
        )

    def choices(self, state: _State) -> list[tuple[int, int]]:
        """Starts that exclude each other, as process and stream."""
        return [
            (process, stream)
            for process in range(len(self.programs))
            if self._room(state, process)
            for stream in self._startable(state, process)
        ]

    def start(self, state: _State, process: int, stream: int) -> None:
        """Start a kernel. One that computes needs a place and gives it back; how long it runs makes no difference."""
        if stream == _COMPUTING:
            state.computed[process] += 1
        else:
            state.resident[process] |= {stream}

    def _advance(self, state: _State, process: int) -> bool:
        """Take the free steps of one process, once; whether there was one."""
        moved = self._host(state, process)
        computing = self.programs[process].computing
        while state.computed[process] < self._enqueued(state, process):
            entry = computing[state.computed[process]]
            if isinstance(entry, Compute) or state.done[process][entry.stream] <= entry.index:
                break
            state.computed[process] += 1
            moved = True
        if not self._scarce(state, process):
            for stream in self._startable(state, process):
                self.start(state, process, stream)
                moved = True
        for stream in state.resident[process]:
            moved |= self._end(state, process, stream)
        return moved

    def _host(self, state: _State, process: int) -> bool:
        host, before = self.programs[process].host, state.host[process]
        while state.host[process] < len(host):
            match host[state.host[process]]:
                case Meet(place, others):
                    if any(state.host[p] <= self.arrivals[p].get(place, len(self.programs[p].host)) for p in others):
                        break
                case Drain() if state.computed[process] < self._enqueued(state, process):
                    break
            state.host[process] += 1
        return state.host[process] > before

    def _end(self, state: _State, process: int, stream: int) -> bool:
        """End a kernel and those that it meets, if all are resident."""
        kernel = self.programs[process].streams[stream][state.done[process][stream]]
        partners = self.partners[kernel.match]
        here = [p for p, s, index in partners if s in state.resident[p] and state.done[p][s] == index]
        if sorted(here) != sorted(kernel.members):
            return False
        for p, s, _ in partners:
            state.resident[p] -= {s}
            state.done[p][s] += 1
        return True

    def _startable(self, state: _State, process: int) -> list[int]:
        found = []
        for stream, kernels in enumerate(self.programs[process].streams):
            index = state.done[process][stream]
            if stream in state.resident[process] or index == len(kernels):
                continue
            launched = state.host[process] > self.launches[process][stream][index]
            if launched and kernels[index].gate <= state.computed[process]:
                found.append(stream)
        at = state.computed[process]
        if at < self._enqueued(state, process) and isinstance(self.programs[process].computing[at], Compute):
            found.append(_COMPUTING)
        return found

    def _scarce(self, state: _State, process: int) -> bool:
        """Whether the device may come to hold as many kernels as it can."""
        if self.limit is None:
            return False
        streams = self.programs[process].streams
        busy = sum(state.done[process][stream] < len(kernels) for stream, kernels in enumerate(streams))
        return busy + (state.computed[process] <= self.last_kernel[process]) > self.limit

    def _room(self, state: _State, process: int) -> bool:
        return self.limit is None or len(state.resident[process]) < self.limit

    def _enqueued(self, state: _State, process: int) -> int:
        """How many entries the host has put into the stream that computes."""
        return bisect_left(self.enqueued[process], state.host[process])

    def report(self, state: _State) -> str:
        """Where everybody is."""
        lines = []
        for p, program in enumerate(self.programs):
            at = state.host[p]
            heads = [
                f"{kernels[state.done[p][s]].what} ({'resident' if s in state.resident[p] else 'not resident'})"
                for s, kernels in enumerate(program.streams)
                if state.done[p][s] < len(kernels) and self.launches[p][s][state.done[p][s]] < at
            ]
            host = "has ended" if at == len(program.host) else f"is at {program.host[at]}"
            computing = program.computing[state.computed[p] :][:1]
            lines.append(f"  process {p}: its host {host}, its stream at {computing}, kernels: {heads}")
        return "deadlock\n" + "\n".join(lines)
