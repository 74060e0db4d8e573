"""The loop over one rank's actions: a table from the kind of an action to a short method."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pipe.engine.boundary_exchange import BoundaryExchange, BoundaryKey
from lightning_pipe.engine.stage import Batch, Crossings, Inbound, Kept, Saved, Stages
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import Crossing, RunRecord
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.simulate import Event

Returned = tuple[dict[int, Tensor], frozenset[int]]
"""What goes back over a cut: gradients by number, and the numbers that were used."""


Find = Callable[[int], tuple[Batch, int]]
"""The batch that a micro-batch of the schedule belongs to, and its number in it."""


class StageKey(NamedTuple):
    """One stage and one micro-batch."""

    pipe: int
    stage: int
    micro_batch: int


class PreparedAction(NamedTuple):
    """An action, the method that runs it, and what it is about: a stage and micro-batch, or a message's way."""

    action: Action
    run: Callable[[Action, Any], None]
    at: StageKey | BoundaryKey | None


class Program(NamedTuple):
    """Actions prepared for running; those of the last batch mostly come again."""

    actions: Sequence[Action]
    steps: tuple[PreparedAction, ...]
    again: frozenset[StageKey]
    """The forward passes that are run again."""


_NOTHING = Program((), (), frozenset())


@dataclass
class Executor:
    """Runs lowered actions.

    Args:
        stages: computes.
        courier: communicates.
        placement: ``(pipe, stage) -> rank``.
        rank: this rank.
        skips: pairs of stages, not neighbours, of which the first sends to the second past those between.
        reduce: called with a stage when its gradients are complete on this rank.
        position: the action under way, for reports about failures.
        held: forward passes whose backward pass is still to come.
        peak_held: the most of them at any time of the last batch.
        busy: seconds spent computing so far.
        events: where to note when each action computed, in seconds of the host's monotonic clock; ``None``: nowhere.
    """

    stages: Stages
    courier: BoundaryExchange
    placement: Mapping[tuple[int, int], int]
    rank: int
    skips: Sequence[tuple[int, int]]
    reduce: Callable[[int], None]
    position: Action | None = None
    held: int = 0
    peak_held: int = 0
    busy: float = 0.0
    events: list[Event] | None = None
    _find: Find = field(init=False)
    _program: Program = _NOTHING
    _again: set[StageKey] = field(default_factory=set)
    _kept: dict[StageKey, Kept] = field(default_factory=dict)
    _saved: dict[StageKey, Saved] = field(default_factory=dict)
    _arrived: dict[StageKey, dict[int, frozenset[int]]] = field(default_factory=dict)
    _inbound: dict[BoundaryKey, Inbound] = field(default_factory=dict)
    _crossing: dict[BoundaryKey, Crossing] = field(default_factory=dict)
    _gradients: dict[BoundaryKey, Returned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.connect(self.skips)
        self._methods: dict[Kind, Callable[[Action, Any], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
            Kind.REDUCE: self._reduce,
        }

    def connect(self, skips: Sequence[tuple[int, int]]) -> None:
        """Let these pairs of stages, not neighbours, send to each other from now on."""
        self.skips = skips
        stages = range(len(self.stages.layers))
        ends = [*pairwise(stages), *skips]  # neighbours first
        self._later = [[late for early, late in ends if early == stage] for stage in stages]
        self._earlier = [[early for early, late in ends if late == stage] for stage in stages]

    def run(self, actions: Sequence[Action], batch: Batch) -> None:
        """Run one batch from the first action to the flush."""
        self._prepare(actions)
        self._again = set(self._program.again)
        self.peak_held = 0
        with self._whole():
            self._loop(lambda micro_batch: (batch, micro_batch))
            self.courier.settle()

    def advance(self, actions: Sequence[Action], again: Container[tuple[int, int]], find: Find) -> None:
        """Run one call of a schedule without a flush: what it leaves under way stays so.

        Args:
            actions: the call's actions; micro-batches are numbered over all batches.
            again: the forwards among them that a later call runs again, as ``(stage, micro_batch)``.
            find: knows the batch of a micro-batch.
        """
        self._prepare(actions)
        self._again |= {_place(a) for a in actions if a.kind is Kind.FORWARD and a[1:3] in again}
        with self._whole():
            self._loop(find)
            self.courier.turn()

    def empty(self) -> None:
        """Nothing is under way any more after some calls of `advance`: end what they have left open."""
        with self._whole():
            self.courier.settle()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around a batch or call: if it fails, everything that is under way is dropped."""
        try:
            yield
            self.position = None
        except BaseException:
            self.abandon()
            raise
        finally:
            if self.courier.transport.board is not None:
                self.courier.transport.board.position = None

    def _prepare(self, actions: Sequence[Action]) -> None:
        if actions is not self._program.actions:
            steps = tuple(PreparedAction(action, self._methods[action.kind], _subject(action)) for action in actions)
            again = frozenset(_place(action) for action in actions if action.kind is Kind.RECOMPUTE)
            self._program = Program(actions, steps, again)

    def _loop(self, find: Find) -> None:
        self._find = find
        board = self.courier.transport.board
        if board is not None:
            board.program = self._program.actions
        for action, run, at in self._program.steps:
            self.position = action
            if board is not None:
                board.position = action
            run(action, at)

    def abandon(self) -> None:
        """Drop what is under way, so that the next batch starts clean and no graph stays in memory."""
        self.courier.reset()
        self._again.clear()
        for kept in (self._kept, self._saved, self._arrived, self._inbound, self._crossing, self._gradients):
            kept.clear()
        self.held = 0

    def _note(self, action: Action, start: float) -> None:
        """Note when an action has computed; waiting for its input was not part of it."""
        end = time.perf_counter()
        self.busy += end - start
        if self.events is not None:
            kind, stage, micro_batch, pipe, *_ = action
            self.events.append(Event(self.rank, kind, stage, micro_batch, pipe, start, end))

    # ------------------------------------------------------------------ compute

    def _forward(self, action: Action, here: StageKey) -> None:
        inbound = self._collect(here)
        batch, index = self._find(here.micro_batch)
        start = time.perf_counter()
        with batch.using(index):
            if here in self._again:
                self._kept[here], crossings = self.stages.forward_again(here.stage, index, batch, inbound)
            else:
                saved, crossings = self.stages.forward(here.stage, index, batch, inbound)
                if batch.training:
                    self._hold(here, saved)
        self._note(action, start)
        for to in self._later[here.stage]:
            crossing = crossings.get(to) or _empty(crossings)
            way = BoundaryKey(*here, to)
            if self.placement[here.pipe, to] == self.rank:
                self._inbound[way] = hand_over(crossing)
            else:
                self._crossing[way] = crossing

    def _collect(self, here: StageKey) -> Inbound | None:
        """What earlier stages send to a stage, put together."""
        inbound: Inbound | None = None
        earlier = self._earlier[here.stage]
        for stage in earlier:
            way = BoundaryKey(here.pipe, stage, here.micro_batch, here.stage)
            part = self._inbound.pop(way, None)
            if part is None:
                peer = self.placement[here.pipe, stage]
                part = self.courier.receive(way, peer, self._key(here.micro_batch))
            if len(earlier) > 1:
                self._arrived.setdefault(here, {})[stage] = frozenset(part[1])
            inbound = part if inbound is None else joined(inbound, part)
        return inbound

    def _recompute(self, action: Action, here: StageKey) -> None:
        batch, index = self._find(here.micro_batch)
        self._again.discard(here)
        start = time.perf_counter()
        with batch.using(index):
            self._hold(here, self.stages.recompute(here.stage, index, batch, self._kept.pop(here)))
        self._note(action, start)

    def _hold(self, here: StageKey, saved: Saved) -> None:
        self._saved[here] = saved
        self.held += 1
        self.peak_held = max(self.peak_held, self.held)

    def _backward(self, action: Action, here: StageKey) -> None:
        gradients: dict[int, Tensor] = {}
        used: frozenset[int] = frozenset()
        for to in self._later[here.stage]:
            way = BoundaryKey(*here, to)
            part = self._gradients.pop(way, None)
            if part is None:
                part = self.courier.receive_gradients(way, self.placement[here.pipe, to])
            gradients |= part[0]
            used |= part[1]
        batch, index = self._find(here.micro_batch)
        start = time.perf_counter()
        # a layer that checkpoints itself runs again in its backward pass
        with batch.using(index):
            if action.kind is Kind.BACKWARD:
                returned = self.stages.backward(self._saved.pop(here), gradients, used)
                self.held -= 1
            else:
                returned = self.stages.backward_input(self._saved[here], gradients, used)
        self._note(action, start)
        arrived = self._arrived.pop(here, None)
        for stage in self._earlier[here.stage]:
            part = returned if arrived is None else _of(returned, arrived[stage])
            # Where it came from, here or by a message.
            self._gradients[BoundaryKey(here.pipe, stage, here.micro_batch, here.stage)] = part

    def _backward_weight(self, action: Action, here: StageKey) -> None:
        batch, index = self._find(here.micro_batch)
        start = time.perf_counter()
        with batch.using(index):
            self.stages.backward_weight(self._saved.pop(here))
        self._note(action, start)
        self.held -= 1

    # ------------------------------------------------------------------ messages

    def _send_forward(self, action: Action, way: BoundaryKey) -> None:
        self.courier.send(way, _peer(action), self._key(way.micro_batch), self._crossing.pop(way))

    def _receive_forward(self, action: Action, way: BoundaryKey) -> None:
        self.courier.expect(way, _peer(action), self._key(way.micro_batch))

    def _send_backward(self, action: Action, way: BoundaryKey) -> None:
        self.courier.send_gradients(way, _peer(action), *self._gradients.pop(way))

    def _receive_backward(self, action: Action, way: BoundaryKey) -> None:
        self.courier.expect_gradients(way, _peer(action))

    def _reduce(self, action: Action, _: None) -> None:
        self.reduce(action.stage)

    def _key(self, micro_batch: int) -> Hashable:
        batch, index = self._find(micro_batch)
        return batch.keys[index]


def hand_over(crossing: Crossing) -> Inbound:
    """A crossing between two stages of one rank: no copy, nothing left out."""
    pairs = zip(crossing.path.entries, crossing.tensors, strict=True)
    return crossing.path, {entry.number: tensor.detach() for entry, tensor in pairs}


def _empty(crossings: Crossings) -> Crossing:
    """What a skip carries for a micro-batch that stashed no tensor."""
    return Crossing(RunRecord(next(iter(crossings.values())).path.calls, ()), ())


def joined(first: Inbound, second: Inbound) -> Inbound:
    """What two earlier stages send to one. The later of them has made all the calls of the earlier one, and more."""
    path, other = first[0], second[0]
    if path.calls[: len(other.calls)] != other.calls:
        raise CutError(
            "the stage before this one has taken another path than the one that sends a skip connection.",
            hint="The step must take the same path on all ranks: no decisions by rank, time, unseeded randomness or "
            "values.",
        )
    return RunRecord(path.calls, path.entries + other.entries), first[1] | second[1]


def _of(returned: Returned, numbers: frozenset[int]) -> Returned:
    """The part of what goes back that concerns some numbers."""
    return {number: gradient for number, gradient in returned[0].items() if number in numbers}, returned[1]


def _subject(action: Action) -> StageKey | BoundaryKey | None:
    """What an action is about."""
    if action.kind is Kind.REDUCE:
        return None
    if action.peer is None:
        return _place(action)
    to_later = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
    return _way(action, 1 if to_later else -1)


def _place(action: Action) -> StageKey:
    return StageKey(action.pipe, action.stage, _index(action))


def _way(action: Action, step: int) -> BoundaryKey:
    """The way that a message takes; ``step`` tells where the other end is if the action does not."""
    other = action.stage + step if action.other is None else action.other
    return BoundaryKey(action.pipe, min(action.stage, other), _index(action), max(action.stage, other))


def _index(action: Action) -> int:
    if action.micro_batch is None:
        raise ValueError(f"{action} has no micro-batch")
    return action.micro_batch


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ValueError(f"{action} has no peer")
    return action.peer
