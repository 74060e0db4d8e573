"""Batches of an evaluation that follow each other through the stages: this rank's part of their endless order.

The micro-batches of one batch keep to the same order. A batch begins in each *round*, and goes on by one stage in each:
stage s runs batch b in round b + s. A rank with several stages runs the latest one first, one pass in each *slot* of a
round. Rank 0 has stages 0 and 2, rank 1 the others::

    round    0         1         2         3         4
    rank 0        0F0       0F1  2F0  0F2  2F1  0F3  2F2  0F4
    rank 1                  1F0       1F1  3F0  1F2  3F1  1F3

A pass needs the pass of the stage before it, which is in an earlier round. So ranks that run their passes in this order
never wait for each other in a circle, wherever in it each of them is. A rank posts the receive of what an earlier stage
sends in the slot in which that is sent, so that both ends of a lane keep to one order of messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lightning_pipe.engine.batch import Batch, StepFunction
from lightning_pipe.intercept.tensor_state import counting
from lightning_pipe.schedules import Action, Kind

if TYPE_CHECKING:
    from lightning_pipe.engine.executor import Executor
    from lightning_pipe.engine.pipeline import Pipeline


class StreamedEvaluation:
    """Runs batches of one micro-batch through the stages of pipe 0, action by action.

    Args:
        pipeline: the module over the ranks.
        executor: runs the actions; ``None``: that of evaluations.

    Attributes:
        ahead: how many slots behind the end of a batch a rank may run before it knows what that has brought: what it
            needs for one more, the rank with the last stage has sent before. Where each rank has one stage, that one
            sends nothing, and these are more: ranks whose batches take a little longer on some than on others would
            otherwise wait for each other in every slot.
        lag: how many batches later what a batch has sent has surely arrived.

    Example:
        All batches on one rank, without regard to who waits for their results::

            streamed = StreamedEvaluation(pipeline)
            for number, batch in enumerate(batches):
                streamed.begin(number, step, batch)
            for action in streamed.up_to(streamed.end_of(len(batches) - 1)):
                if action.micro_batch < len(batches):
                    streamed.perform(action)
            streamed.end()
    """

    def __init__(self, pipeline: Pipeline, executor: Executor | None = None) -> None:
        self._pipeline, self._executor = pipeline, executor or pipeline.executor
        stages = range(len(self._executor.later))
        self._ranks = [self._executor.placement[0, stage] for stage in stages]
        of_ranks = [[s for s in stages[::-1] if self._ranks[s] == rank] for rank in sorted({*self._ranks})]
        # by slot of a round: the stages that run in it, in the order of their ranks
        self._slots = [[stage for stage in slot if stage is not None] for slot in zip_longest(*of_ranks)]
        self._next = 0
        self.ahead = max(1, len(stages) // 2) if len(self._slots) == 1 else 1
        # what a batch sends is there when the one so many batches later begins
        self.lag = len(stages) + 1 + self.ahead

    def end_of(self, number: int) -> int:
        """The slot in which a batch comes to its end, the first one of a round."""
        return (number + len(self._ranks) - 1) * len(self._slots)

    def begun(self, number: int) -> int:
        """The number of batches that may have begun on some rank before it knows what the end of one has brought."""
        return (self.end_of(number) + self.ahead) // len(self._slots) + 1

    def begin(self, number: int, step: StepFunction, batch: Any, *, seed: int = 0) -> Batch:
        """Make a batch known, before its first action.

        Args:
            number: of the batch, from 0.
            step: see `Pipeline.train`.
            batch: the batch, whole.
            seed: the seed of its random streams.
        """
        made = self._pipeline.batch(step, [batch], seed)
        made.ahead = True
        self._executor.begin(made, number)
        return made

    def up_to(self, slot: int) -> Iterator[Action]:
        """The actions of this rank up to those of a slot; each comes once."""
        while self._next <= slot:
            number, place = divmod(self._next, len(self._slots))
            self._next += 1
            yield from self._lowered([(stage, number - stage) for stage in self._slots[place] if stage <= number])

    @counting()
    def perform(self, action: Action) -> None:
        """Run an action."""
        number, forward, batches = action.micro_batch or 0, action.kind is Kind.FORWARD, self._executor.batches
        with self._pipeline.running(batches[number][0].streams) if forward else nullcontext():
            # no gradients come back, and no rank is so many batches ahead of another
            self._executor.advance([action], over=(number - self.lag,))
        if forward:
            self._pipeline.commit_statistics(evaluated=True)
            if self._pipeline.transport.rank not in self._ranks[action.stage + 1 :]:
                del batches[number]  # what has left its stages is all that is needed of it

    def end(self) -> None:
        """End behind the last batch."""
        self._executor.stages.interceptor.state.begin_batch()
        self._executor.advance(())

    def _lowered(self, passes: list[tuple[int, int]]) -> Iterator[Action]:
        """What this rank does in a slot: its pass, then the messages that all ranks' passes send.

        Args:
            passes: the stage and the batch of each, in the order of their ranks.
        """
        mine = self._pipeline.transport.rank
        yield from (Action(Kind.FORWARD, stage, batch) for stage, batch in passes if self._ranks[stage] == mine)
        # in one order of the sending ranks, so that both ends of a pair of ranks post them alike: the last rank first,
        # or a rank would fetch the batch that it is to receive next before it sends what the next stage waits for
        for stage, batch in reversed(passes):
            rank = self._ranks[stage]
            for to in self._executor.later[stage]:
                peer = self._ranks[to]
                other = None if to == stage + 1 else to
                if rank == mine != peer:
                    yield Action(Kind.SEND_FORWARD, stage, batch, peer=peer, other=other)
                elif peer == mine != rank:
                    yield Action(Kind.RECEIVE_FORWARD, to, batch, peer=rank, other=None if other is None else stage)
