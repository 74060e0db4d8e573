"""The loop over one rank's actions: a table from the kind of an action to a short method."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from lightning_pipe.pipeline.courier import Courier, Crossroad
from lightning_pipe.pipeline.cut.path import Crossing
from lightning_pipe.pipeline.stage import Batch, Inbound, Kept, Saved, Stages
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.simulate import Event


@dataclass
class Executor:
    """Runs lowered actions.

    Args:
        stages: computes.
        courier: communicates.
        placement: ``(pipe, stage) -> rank``.
        rank: this rank.
        reduce: called with a stage when its gradients are complete on this rank.
        position: the action under way, for reports about failures.
        held: forward passes whose backward pass is still to come.
        peak_held: the most of them at any time of the last batch.
        events: where to note when each action computed, in seconds of the host's monotonic clock; ``None``: nowhere.
    """

    stages: Stages
    courier: Courier
    placement: Mapping[tuple[int, int], int]
    rank: int
    reduce: Callable[[int], None]
    position: Action | None = None
    held: int = 0
    peak_held: int = 0
    events: list[Event] | None = None
    _batch: Batch = field(init=False)
    _again: set[Crossroad] = field(default_factory=set)
    _kept: dict[Crossroad, Kept] = field(default_factory=dict)
    _saved: dict[Crossroad, Saved] = field(default_factory=dict)
    _inbound: dict[Crossroad, Inbound] = field(default_factory=dict)
    _crossing: dict[Crossroad, Crossing] = field(default_factory=dict)
    _gradients: dict[Crossroad, tuple[dict[int, Tensor], frozenset[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._methods: dict[Kind, Callable[[Action], None]] = {
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

    def run(self, actions: Sequence[Action], batch: Batch) -> None:
        """Run one batch from the first action to the flush."""
        self._batch = batch
        self._again = {_here(action) for action in actions if action.kind is Kind.RECOMPUTE}
        self.peak_held = 0
        board = self.courier.transport.board
        if board is not None:
            board.program = actions
        try:
            for action in actions:
                self.position = action
                if board is not None:
                    board.position = action
                self._methods[action.kind](action)
            self.courier.settle()
            self.position = None
        except BaseException:
            self._abandon()
            raise
        finally:
            if board is not None:
                board.position = None

    def _abandon(self) -> None:
        """Drop a batch that failed, so that the next one starts clean and no graph stays in memory."""
        self.courier.reset()
        for kept in (self._kept, self._saved, self._inbound, self._crossing, self._gradients):
            kept.clear()
        self.held = 0

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        """Note when an action computes; waiting for its input is not part of it."""
        start = time.perf_counter()
        yield
        if self.events is not None:
            kind, stage, micro_batch, pipe, _ = action
            self.events.append(Event(self.rank, kind, stage, micro_batch, pipe, start, time.perf_counter()))

    # ------------------------------------------------------------------ compute

    def _forward(self, action: Action) -> None:
        here = _here(action)
        pipe, stage, micro_batch = here
        inbound = None
        if stage > 0:
            at = Crossroad(pipe, stage - 1, micro_batch)
            inbound = self._inbound.pop(at, None)
            if inbound is None:
                peer = self.placement[pipe, stage - 1]
                inbound = self.courier.receive(at, peer, self._batch.keys[micro_batch])
        with self._timed(action):
            if here in self._again:
                self._kept[here], crossing = self.stages.forward_again(stage, micro_batch, self._batch, inbound)
            else:
                saved, crossing = self.stages.forward(stage, micro_batch, self._batch, inbound)
                if self._batch.training:
                    self._hold(here, saved)
        if crossing is None:
            return
        if self.placement[pipe, stage + 1] == self.rank:
            self._inbound[here] = hand_over(crossing)
        else:
            self._crossing[here] = crossing

    def _recompute(self, action: Action) -> None:
        here = _here(action)
        with self._timed(action):
            self._hold(here, self.stages.recompute(here.stage, here.micro_batch, self._batch, self._kept.pop(here)))

    def _hold(self, here: Crossroad, saved: Saved) -> None:
        self._saved[here] = saved
        self.held += 1
        self.peak_held = max(self.peak_held, self.held)

    def _backward(self, action: Action) -> None:
        here = _here(action)
        pipe, stage, micro_batch = here
        gradients: dict[int, Tensor] = {}
        used: frozenset[int] = frozenset()
        if stage + 1 < len(self.stages.layers):
            local = self._gradients.pop(here, None)
            if local is None:
                local = self.courier.receive_gradients(here, self.placement[pipe, stage + 1])
            gradients, used = local
        with self._timed(action):
            if action.kind is Kind.BACKWARD:
                returned = self.stages.backward(self._saved.pop(here), gradients, used)
                self.held -= 1
            else:
                returned = self.stages.backward_input(self._saved[here], gradients, used)
        if stage > 0:
            # The next one to need them: the previous stage, here or by a message.
            self._gradients[Crossroad(pipe, stage - 1, micro_batch)] = returned

    def _backward_weight(self, action: Action) -> None:
        with self._timed(action):
            self.stages.backward_weight(self._saved.pop(_here(action)))
        self.held -= 1

    # ------------------------------------------------------------------ messages

    def _send_forward(self, action: Action) -> None:
        at = _here(action)
        self.courier.send(at, _peer(action), self._batch.keys[at.micro_batch], self._crossing.pop(at))

    def _receive_forward(self, action: Action) -> None:
        at = Crossroad(action.pipe, action.stage - 1, _index(action))
        self.courier.expect(at, _peer(action), self._batch.keys[at.micro_batch])

    def _send_backward(self, action: Action) -> None:
        at = Crossroad(action.pipe, action.stage - 1, _index(action))
        self.courier.send_gradients(at, _peer(action), *self._gradients.pop(at))

    def _receive_backward(self, action: Action) -> None:
        self.courier.expect_gradients(_here(action), _peer(action))

    def _reduce(self, action: Action) -> None:
        self.reduce(action.stage)


def hand_over(crossing: Crossing) -> Inbound:
    """A crossing between two stages of one rank: no copy, nothing left out."""
    pairs = zip(crossing.path.entries, crossing.tensors, strict=True)
    return crossing.path, {entry.number: tensor.detach() for entry, tensor in pairs}


def _here(action: Action) -> Crossroad:
    return Crossroad(action.pipe, action.stage, _index(action))


def _index(action: Action) -> int:
    if action.micro_batch is None:
        raise ValueError(f"{action} has no micro-batch")
    return action.micro_batch


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ValueError(f"{action} has no peer")
    return action.peer
