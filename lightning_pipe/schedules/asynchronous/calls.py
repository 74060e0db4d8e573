"""Cuts the schedule of many batches into the calls that bring them, one each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.dependencies import Timed, play
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.schedules.passes.lower import lower

_FORWARDS = frozenset({Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD})
_COMPUTED = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT})
_COMPLETES = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


@dataclass(frozen=True)
class Call:
    """What one rank does in one call. Batches and micro-batches are counted from the first of the stream.

    Args:
        actions: computations and messages, in order.
        again: the forwards among them that run again before their backward, as ``(stage, micro_batch)``.
        update: the batches whose gradients, averaged, the optimizer step at the end of the call takes; empty: no step.
        finished: the batches whose last forward pass on the last stage runs in this call; the same on all ranks.
        oldest: the oldest version of the weights that a later call needs.
    """

    actions: tuple[Action, ...]
    again: frozenset[tuple[int, int]]
    update: tuple[int, ...]
    finished: tuple[int, ...]
    oldest: int

    def shifted(self, batches: int, micro_batches: int, steps: int) -> Call:
        """The same call later in the stream."""
        if not batches:
            return self
        return Call(
            tuple(action._replace(micro_batch=_index(action) + micro_batches) for action in self.actions),
            frozenset((stage, index + micro_batches) for stage, index in self.again),
            tuple(batch + batches for batch in self.update),
            tuple(batch + batches for batch in self.finished),
            self.oldest + steps,
        )


def covers(schedule: Schedule, stage: int) -> list[tuple[int, ...]]:
    """For each step of a stage the micro-batches that it takes, over all ranks that hold the stage."""
    taken: defaultdict[int, list[int]] = defaultdict(list)
    for rank in schedule.holders(stage):
        step = 0
        for action in schedule.actions[rank]:
            if action.stage == stage and action.kind is Kind.STEP:
                step += 1
            elif action.stage == stage and action.kind in _COMPLETES:
                taken[step].append(_index(action))
    return [tuple(sorted(taken[step])) for step in sorted(taken)]


class Cut:
    """A schedule for many batches, with the call of every action; see `Stream` for the rule.

    Args:
        schedule: an asynchronous schedule.
        size: micro-batches of a batch.
        skips: see `lower`.

    Attributes:
        lag: calls after its own in which a batch is not done yet, at most.
        versions: ``(rank, micro_batch)`` -> steps that the weights have seen on which it runs.

    Raises:
        ScheduleError: its steps do not fit between calls.
    """

    def __init__(self, schedule: Schedule, size: int, skips: Iterable[tuple[int, int]]) -> None:
        self._schedule, self._size = schedule, size
        self._covers = [covers(schedule, stage) for stage in range(schedule.stages)]
        self._call_of = [{timed.action: int(timed.start) // size for timed in own} for own in self._slots()]
        self._lowered = lower(schedule, skips)
        self._finished = self._find_finished()
        self.lag = max(call - self._batch(action) for own in self._call_of for action, call in own.items())
        self.versions = self._find_versions()
        self._check_lanes()

    def _batch(self, action: Action) -> int:
        return _index(action) // self._size

    # ------------------------------------------------------------------ which call

    def _slots(self) -> list[list[Timed]]:
        """The slot of every action; a call has as many slots as a batch has micro-batches."""
        release: dict[Action, int] = {}

        def earliest(action: Action) -> int:
            arrives = _index(action) if action.kind is Kind.FORWARD else 0
            return max(arrives, release.get(action, 0))

        for _ in range(4 * self._schedule.ranks + 4):
            played = play(
                self._schedule,
                duration=lambda action: 0,
                transfer=lambda action: int(action.kind is Kind.FORWARD),
                release=earliest,
            )
            postponed = self._postponed(played)
            if not postponed:
                return played
            release.update(postponed)
        raise ScheduleError(f"Schedule {self._schedule.name!r}: the steps of its ranks wait for each other.")

    def _postponed(self, played: Sequence[Sequence[Timed]]) -> dict[Action, int]:
        """What is too early: the ranks of a stage step in the same call, forwards run after the steps they need."""
        slots: dict[tuple[int, int], int] = {}
        for own in played:
            for step, action, start in _numbered_steps(own):
                slots[action.stage, step] = max(start, slots.get((action.stage, step), 0))
        late: dict[Action, int] = {}
        for own in played:
            late.update(
                (action, slots[action.stage, step])
                for step, action, start in _numbered_steps(own)
                if start < slots[action.stage, step]
            )
            for action, begin, _ in own:
                if action.kind is Kind.FORWARD:
                    version = self._schedule.versions[action.stage, _index(action)]
                    if version and (action.stage, version - 1) not in slots:
                        raise ScheduleError(
                            f"Schedule {self._schedule.name!r} runs {action} on weights after {version} steps, more "
                            f"than stage {action.stage} ever takes."
                        )
                    ready = (slots[action.stage, version - 1] // self._size + 1) * self._size if version else 0
                    if begin < ready:
                        late[action] = ready
        return late

    def _find_versions(self) -> dict[tuple[int, int], int]:
        versions: dict[tuple[int, int], int] = {}
        for rank, own in enumerate(self._call_of):
            for action in own:
                if action.kind is not Kind.FORWARD:
                    continue
                version = self._schedule.versions[action.stage, _index(action)]
                if versions.setdefault((rank, _index(action)), version) != version:
                    raise ScheduleError(
                        f"Schedule {self._schedule.name!r} runs micro-batch {action.micro_batch} on different versions "
                        f"of the weights on the stages of row {rank}; they share one optimizer.",
                        hint="Let the stages of a rank step together.",
                    )
        return versions

    def _find_finished(self) -> dict[int, tuple[int, ...]]:
        """For each call the batches whose last loss it computes."""
        last: dict[int, int] = {}
        for own in self._call_of:
            for action, call in own.items():
                if action.kind is Kind.FORWARD and action.stage == self._schedule.stages - 1:
                    last[self._batch(action)] = max(call, last.get(self._batch(action), 0))
        finished: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
        for batch in sorted(last):
            finished[last[batch]] += (batch,)
        return finished

    # ------------------------------------------------------------------ what is in a call

    def calls(self, rank: int, number: int) -> list[Call]:
        """The first calls of a rank; what towards the end waits for batches to come is not right."""
        actions: list[list[Action]] = [[] for _ in range(number)]
        for action, call in self._placed(rank):
            if call < number:
                actions[call].append(action)
        recomputed = {action[1:3] for action in self._call_of[rank] if action.kind is Kind.RECOMPUTE}
        updates, oldest = self._updates(rank, number), self._oldest(rank, number)
        return [
            Call(
                tuple(found),
                frozenset((a.stage, _index(a)) for a in found if a.kind is Kind.FORWARD and a[1:3] in recomputed),
                updates.get(call, ()),
                self._finished.get(call, ()),
                oldest[call],
            )
            for call, found in enumerate(actions)
        ]

    def _placed(self, rank: int) -> Iterator[tuple[Action, int]]:
        """The lowered actions of a rank with their calls: messages belong to the computation at this end."""
        own = self._call_of[rank]
        computed = {_end(action): call for action, call in own.items() if action.kind in _COMPUTED}
        for action in self._lowered[rank]:
            if action.kind not in (Kind.STEP, Kind.REDUCE):
                yield action, own[action] if action in own else computed[_end(action)]

    def _updates(self, rank: int, number: int) -> dict[int, tuple[int, ...]]:
        """For each call the batches of the step at its end."""
        name, stages = self._schedule.name, self._schedule.stages_of(rank)
        by_stage: dict[int, dict[int, tuple[int, ...]]] = {stage: {} for stage in stages}
        steps: Counter[int] = Counter()
        for action, call in self._call_of[rank].items():
            if action.kind is not Kind.STEP:
                continue
            cover = self._covers[action.stage][steps[action.stage]]
            steps[action.stage] += 1
            if call >= number:
                continue
            if call in by_stage[action.stage]:
                raise ScheduleError(
                    f"Schedule {name!r} steps twice on stage {action.stage} while one batch comes.",
                    hint="Let a step take as many micro-batches as a batch has, or a multiple.",
                )
            by_stage[action.stage][call] = tuple(sorted({index // self._size for index in cover}))
        for stage in stages[1:]:
            if by_stage[stage] != by_stage[stages[0]]:
                raise ScheduleError(
                    f"Schedule {name!r}: stages {stages[0]} and {stage} of row {rank} do not step together; they "
                    "share one optimizer."
                )
        return by_stage[stages[0]]

    def _oldest(self, rank: int, number: int) -> list[int]:
        """For each call the oldest version that later ones use."""
        none = max(self.versions.values())
        needed = [none] * (1 + max(number, *self._call_of[rank].values()))
        for action, call in self._call_of[rank].items():
            if action.kind is not Kind.STEP:
                needed[call] = min(needed[call], self.versions[rank, _index(action)])
        return [*accumulate(reversed(needed), min)][::-1][1 : number + 1]

    # ------------------------------------------------------------------ messages

    def _check_lanes(self) -> None:
        """Cutting moves receives; messages between two ranks must still be in the same order at both ends."""
        lanes: defaultdict[tuple[int, int, bool, int], list[object]] = defaultdict(list)
        for rank in range(self._schedule.ranks):
            for action, _ in sorted(self._placed(rank), key=lambda placed: placed[1]):
                if action.peer is not None:
                    forward = action.kind in _FORWARDS
                    lanes[rank, action.peer, forward, action.pipe].append(_message(action, rank, forward))
        for (rank, peer, forward, pipe), messages in lanes.items():
            if lanes.get((peer, rank, forward, pipe)) != messages:
                raise ScheduleError(
                    f"Schedule {self._schedule.name!r}: cut into calls, rows {rank} and {peer} would exchange their "
                    "messages in different orders.",
                    hint="Let every rank hold consecutive stages.",
                )


def _end(action: Action) -> tuple[bool, int, int]:
    """What a computation and its messages have in common."""
    return action.kind in _FORWARDS, action.stage, _index(action)


def _message(action: Action, rank: int, forward: bool) -> tuple[int | None, ...]:
    """A message as both of its ends name it: from which rank and stage to which stage, and the micro-batch."""
    sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    other = action.stage + (1 if forward == sends else -1) if action.other is None else action.other
    ends = (action.stage, other) if sends else (other, action.stage)
    return (rank if sends else action.peer, *ends, action.micro_batch)


def _numbered_steps(own: Iterable[Timed]) -> Iterator[tuple[int, Action, int]]:
    """The steps of a rank with their number on their stage, and their slot."""
    steps: Counter[int] = Counter()
    for action, start, _ in own:
        if action.kind is Kind.STEP:
            yield steps[action.stage], action, int(start)
            steps[action.stage] += 1


def _index(action: Action) -> int:
    return action.micro_batch or 0
