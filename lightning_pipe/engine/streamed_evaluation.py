"""Batches of an evaluation that follow each other through the stages: this rank's part of their endless order.

A rank with the stages 1 and 2 of four; it posts the receive of what an earlier stage sends in the slot in which that is
sent, so that both ends of a lane keep to one order of messages::

    slot 1   1RECV_F0 was posted in slot 0     1F0
    slot 2   1RECV_F1                          2F0   2SEND_F0
    slot 3                                     1F1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lightning_pipe.engine.batch import Batch, StepFunction
from lightning_pipe.intercept.tensor_state import counting
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.schedules.evaluation_order import EvaluationOrder, Pass

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline


class StreamedEvaluation:
    """Runs batches of one micro-batch through the stages of pipe 0, action by action.

    Args:
        pipeline: the module over the ranks.

    Attributes:
        order: what all ranks run.
        lag: how many batches later what a batch has sent has surely arrived.

    Example:
        All batches on one rank, without regard to who waits for their results::

            streamed = StreamedEvaluation(pipeline)
            for number, batch in enumerate(batches):
                streamed.begin(number, step, batch)
            for number in range(len(batches)):
                end = streamed.proceed()
                while (action := streamed.due(end)) is not None:
                    if action.micro_batch < len(batches):
                        streamed.perform(action)
            streamed.end()
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._executor = pipeline, pipeline.executor
        self._ranks = [pipeline.placement[0, stage] for stage in range(len(pipeline.balance))]
        self.order = EvaluationOrder(self._ranks)
        # what a batch sends is there when the one so many batches later begins
        self.lag = len(self._ranks) + 1 + self.order.ahead
        self._actions: deque[tuple[int, Action]] = deque()
        self._ended = 0

    def begin(self, number: int, step: StepFunction, batch: Any, *, seed: int = 0) -> Batch:
        """Make a batch known. Before the actions of it that `due` returns.

        Args:
            number: of the batch, from 0.
            step: see `Pipeline.train`.
            batch: the batch, whole.
            seed: the seed of its random streams.
        """
        made = self._pipeline.evaluation_batch(step, [batch], seed)
        made.ahead = True
        self._executor.begin(made, number)
        return made

    def proceed(self) -> int:
        """Let the next batch come to its end in the order. Returns the slot of that end.

        All actions of the batch before it have been performed.
        """
        end = self.order.to_end()
        self._executor.batches.pop(self._ended - 1, None)
        self._ended += 1
        while self.order.slots:
            slot, passes = self.order.slots.popleft()
            self._actions.extend((slot, action) for action in self._lowered(passes))
        return end

    def due(self, slot: int) -> Action | None:
        """Take the next action of this rank if it is due by a slot."""
        if not self._actions or self._actions[0][0] > slot:
            return None
        return self._actions.popleft()[1]

    @counting()
    def perform(self, action: Action) -> None:
        """Run an action."""
        number, forward = action.micro_batch or 0, action.kind is Kind.FORWARD
        batch, _ = self._executor.batches[number]
        with self._pipeline.running(batch.streams) if forward else nullcontext():
            # no gradients come back, and no rank is so many batches ahead of another
            self._executor.advance([action], over=(number - self.lag,))
        if forward:
            self._pipeline.commit_evaluated()

    def end(self) -> None:
        """End behind the last batch."""
        self._actions.clear()
        self._executor.batches.clear()
        self._executor.stages.interceptor.state.begin_batch()
        self._executor.empty()

    def _lowered(self, passes: list[Pass]) -> Iterator[Action]:
        """What this rank does in a slot: its pass, then the messages that all ranks' passes send."""
        mine = self._pipeline.transport.rank
        yield from (Action(Kind.FORWARD, stage, batch) for rank, stage, batch in passes if rank == mine)
        # in one order of the sending ranks, so that both ends of a pair of ranks post them alike: the last rank first,
        # or a rank would fetch the batch that it is to receive next before it sends what the next stage waits for
        for rank, stage, batch in reversed(passes):
            for to in self._executor.later[stage]:
                peer = self._ranks[to]
                other = None if to == stage + 1 else to
                if rank == mine != peer:
                    yield Action(Kind.SEND_FORWARD, stage, batch, peer=peer, other=other)
                elif peer == mine != rank:
                    yield Action(Kind.RECEIVE_FORWARD, to, batch, peer=rank, other=None if other is None else stage)
