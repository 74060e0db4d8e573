"""The loop over one rank's actions: a table from the kind of an action to a short method."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lightning_pipe.engine.batch import Batch
from lightning_pipe.engine.boundary_exchange import BoundaryExchange, BoundaryKey
from lightning_pipe.engine.stage import Crossings, Kept, Saved, Stages
from lightning_pipe.intercept.crossing import Crossing, Returned
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.simulate import Event

T = TypeVar("T")


class StageKey(NamedTuple):
    """One stage and one micro-batch."""

    pipe: int
    stage: int
    micro_batch: int


@dataclass
class Executor:
    """Runs the lowered actions of one rank, one after the other; each of them is one short method.

    A micro-batch ``m`` on a stage ``s`` of this rank; the boxes are tables, where one action leaves what another
    takes up. What comes from or goes to another rank passes the `BoundaryExchange`::

          from stage s - 1                                                    to stage s + 1
        RECEIVE_FORWARD posts a buffer                                SEND_FORWARD takes
                 |   [left] if s - 1 is on this rank                     [left]
                 v                                                            ^
              FORWARD ------------------------------------------------------- +
                 |  [saved]: the graph; or, if it runs again,
                 |  [kept]: the input alone --> RECOMPUTE --> [saved]
                 v
              BACKWARD, or BACKWARD_INPUT and later BACKWARD_WEIGHT <-------- +
                 |                                                            |
                 v  [gradients]                                               |  [gradients] if s + 1 is on this rank
        SEND_BACKWARD to stage s - 1                                  RECEIVE_BACKWARD posted a buffer

    REDUCE tells `GradientSync` that the last backward pass of a stage is done. FORWARD and BACKWARD are the only
    actions that wait for a message: the receiving actions before them only post buffers. A stage that ends no skip
    connection has one earlier and one later stage; with skip connections these are lists, neighbours first.

    Args:
        stages: computes.
        exchange: communicates.
        placement: ``(pipe, stage) -> rank``.
        reduce: called with a stage when its gradients are complete on this rank.
        busy: seconds spent computing so far.
        skips: pairs of stages, not neighbours, of which the first sends to the second.
        events: where to note when each action computed, in seconds of the clock; ``None``: nowhere.
        clock: the host's monotonic one, which does not wait for a GPU.
        batches: for each micro-batch of the schedule its batch, and its number in it.

    Attributes:
        later: for each stage those that it sends to, neighbours first.
        earlier: for each stage those that send to it, neighbours first.
        kept: what the first run of a forward pass has left that runs again: its input.
        saved: what a forward pass has left for its backward pass: its graph.
        left: what has left a stage for a later one, by a message or on this rank.
        gradients: what is to go back to an earlier stage, by a message or on this rank.
        peak_held: the most forward passes that waited for their backward pass at any time of the last batch.
    """

    stages: Stages
    exchange: BoundaryExchange
    placement: Mapping[tuple[int, int], int]
    reduce: Callable[[int], None]
    skips: Sequence[tuple[int, int]] = ()
    busy: float = 0.0
    events: list[Event] | None = None
    clock: Callable[[], float] = time.perf_counter
    batches: dict[int, tuple[Batch, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept: dict[StageKey, Kept] = {}
        self.saved: dict[StageKey, Saved] = {}
        self.left: dict[BoundaryKey, Crossing] = {}
        self.gradients: dict[BoundaryKey, Returned] = {}
        self.peak_held, self._began = 0, 0.0
        self._again: Container[tuple[int, int | None]] = ()
        stages = range(len(self.stages.layers))
        ends = [*pairwise(stages), *self.skips]  # neighbours first
        self.later = [[late for early, late in ends if early == stage] for stage in stages]
        self.earlier = [[early for early, late in ends if late == stage] for stage in stages]
        self._methods: dict[Kind, Callable[[Any, Any], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.REDUCE: lambda _, here: self.reduce(here.stage),
            Kind.SEND_FORWARD: lambda key, peer: self.exchange.send(key, peer, self.left.pop(key)),
            Kind.RECEIVE_FORWARD: self.exchange.expect,
            Kind.SEND_BACKWARD: lambda key, peer: self.exchange.send_gradients(key, peer, self.gradients.pop(key)),
            Kind.RECEIVE_BACKWARD: self.exchange.expect_gradients,
        }
        self._bound = lru_cache(maxsize=1024)(self._call)

    def run(self, actions: Sequence[Action], batch: Batch) -> None:
        """Run one batch from the first action to the flush.

        Args:
            actions: those of the batch.
            batch: the batch.
        """
        self.peak_held = 0
        if batch.training:
            self.exchange.begin_batch((batch.thorough, *batch.signatures))  # whose words are others
        self.begin(batch)
        self.advance(actions, {action[1:3] for action in actions if action.kind is Kind.RECOMPUTE})

    def begin(self, batch: Batch, first: int = 0) -> None:
        """Take up a batch whose micro-batches are numbered from ``first`` on."""
        for index, signature in enumerate(batch.signatures):
            self.batches[first + index] = batch, index
            self.exchange.set_out(first + index, signature)

    def advance(
        self,
        actions: Iterable[Action],
        again: Container[tuple[int, int | None]] = (),
        over: Iterable[int] | None = None,
    ) -> None:
        """Run some actions; if one fails, everything that is under way is dropped.

        Args:
            actions: those of a batch, of one call of an asynchronous schedule, or one of batches that follow each
                other; there micro-batches are numbered over all batches.
            again: the forwards among them that run again later, as ``(stage, micro_batch)``.
            over: the micro-batches that are done on this rank by then, while others stay under way; see
                `BoundaryExchange.end`. ``None``: all are done.
        """
        self._again, board = again, self.exchange.transport.board
        try:
            for action in actions:
                if board is not None:
                    # A watchdog in another thread reads it when this rank hangs in the action.
                    board.position = action
                method, one, other = self._bound(action)
                method(one, other)
            self.exchange.end(over)
        except BaseException:
            self.abandon()
            raise
        finally:
            if board is not None:
                board.position = None
        for micro_batch in [*self.batches] if over is None else over:
            self.batches.pop(micro_batch, None)

    def _call(self, action: Action) -> tuple[Callable[[Any, Any], None], Any, Any]:
        """The method for an action, and its arguments."""
        method = self._methods[action.kind]
        if action.peer is not None:
            return method, BoundaryKey.of(action), action.peer
        return method, action, StageKey(action.pipe, action.stage, action.micro_batch or 0)

    def abandon(self) -> None:
        """Drop what is under way, so that the next batch starts clean and no graph stays in memory."""
        self.exchange.reset()
        for table in (self.kept, self.saved, self.left, self.gradients, self.batches):
            table.clear()

    def _computed(self, action: Action, here: StageKey, run: Callable[..., T], given: Any = None) -> T:
        """What an action computes, with the weights of its batch. Waiting for its input was not part of its time."""
        batch, index = self.batches[here.micro_batch]
        self._began = self.clock()
        if batch.using is None:
            result = run(here.stage, index, batch, given)
        else:  # in a backward pass as well: a layer that checkpoints itself runs again there
            with batch.using(here.stage, index):
                result = run(here.stage, index, batch, given)
        began, end = self._began, self.clock()
        self.busy += end - began
        if self.events is not None:
            kind, stage, micro_batch, pipe, *_ = action
            self.events.append(Event(self.exchange.transport.rank, kind, stage, micro_batch, pipe, began, end))
        return result

    def _forward(self, action: Action, here: StageKey) -> None:
        receive = partial(self._collect, here)  # waits, when all is ready for what has come
        if action[1:3] in self._again:
            self.kept[here], crossings = self._computed(action, here, self.stages.forward_again, receive)
        else:
            saved, crossings = self._computed(action, here, self.stages.forward, receive)
            if self.batches[here.micro_batch][0].training:
                self._save(here, saved)
        self._leave(here, crossings)

    def _save(self, here: StageKey, saved: Saved) -> None:
        """Keep what a forward pass has left until its backward pass is done."""
        self.saved[here] = saved
        self.peak_held = max(self.peak_held, len(self.saved))

    def _leave(self, here: StageKey, crossings: Crossings) -> None:
        """Put down what leaves a stage."""
        # On the last stage the list is empty, and so are the crossings.
        for to in self.later[here.stage]:
            crossing = crossings.get(to) or next(iter(crossings.values())).emptied()
            self.left[BoundaryKey(*here, to)] = crossing

    def _collect(self, here: StageKey) -> Crossing | None:
        """What earlier stages send to a stage, put together."""
        inbound: Crossing | None = None
        for stage in self.earlier[here.stage]:
            key = BoundaryKey(here.pipe, stage, here.micro_batch, here.stage)
            if (local := self.left.pop(key, None)) is not None:
                received = local.detached()  # no copy, nothing left out
            else:
                received = self.exchange.receive(key, self.placement[here.pipe, stage])
                self._began = self.clock()  # the time that follows is the stage's own
            inbound = received if inbound is None else inbound.joined(received)
        return inbound

    def _recompute(self, action: Action, here: StageKey) -> None:
        self._save(here, self._computed(action, here, self.stages.recompute, self.kept.pop(here)))

    def _backward(self, action: Action, here: StageKey) -> None:
        gradients: dict[int, Tensor] = {}
        used: frozenset[int] = frozenset()
        for to in self.later[here.stage]:
            key = BoundaryKey(*here, to)
            received = self.gradients.pop(key, None)
            if received is None:
                received = self.exchange.receive_gradients(key, self.placement[here.pipe, to])
            # A tensor leaves for one later stage alone, so no number comes back twice.
            gradients |= received.gradients
            used |= received.used
        whole, came = action.kind is Kind.BACKWARD, Returned(gradients, used)
        saved = self.saved.pop(here) if whole else self.saved[here]  # for BACKWARD_WEIGHT
        returned = self._computed(action, here, lambda *_: self.stages.backward(saved, came, whole=whole))
        # A tensor comes from one earlier stage alone, and the numbers of the others mean nothing to a stage.
        for stage in self.earlier[here.stage]:
            self.gradients[BoundaryKey(here.pipe, stage, here.micro_batch, here.stage)] = returned

    def _backward_weight(self, action: Action, here: StageKey) -> None:
        saved = self.saved.pop(here)
        self._computed(action, here, lambda *_: self.stages.backward_weight(saved))
