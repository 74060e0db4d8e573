"""An evaluation loop whose batches follow each other through the stages.

Lightning's loop fetches a batch, evaluates it and calls the hooks behind it, on every rank. In a stream the ranks run
their part of later batches before the loop asks for them. What Lightning does with a batch stays in order, with the
step's outputs, on all ranks. What a rank runs follows one order for all ranks, that of `StreamedEvaluation`. Three
ranks, the batches that they run, and between bars what the loops are at::

    rank 2 (stage 0)   0 1 2 3 |0| 4 |1| 5 |2| 6 ...
    rank 1 (stage 1)     0 1 2 |0| 3 |1| 4 |2| 5 ...
    rank 0 (stage 2)         0 |0| 1 |1| 2 |2| 3 ...     loads batch 4 before it evaluates batch 0

The rank with the last stage, which also loads the batches, sends them, and a report of every batch, without waiting for
the others. Before it evaluates a batch in its loop, it runs what the order has before the end of the batch. The other
ranks go on to a few slots behind that end (`StreamedEvaluation.ahead`), and then wait for the report: whatever they
wait for before is sent by a rank that has got as far in the order without that report.

A run of the step may read too early what an earlier batch changes. Stages compare what they give to layers, and the
last one, which runs all batches in order, has what one device has. Where it differs its run ends, as it does where a
step comes back to layers that it has called. Then no other batch begins in the order. All ranks run what may have begun
on one of them to its end, so that no message is left, and begin anew with this batch: each one waits for the batch
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pipe.engine.streamed_evaluation import StreamedEvaluation
from lightning_pipe.patches import replaced
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.trainer.evaluation.fetched import Fetched, FetchedBatches
from lightning_pipe.trainer.user_step import StepOfBatch

if TYPE_CHECKING:
    from lightning_pipe.trainer.evaluation.evaluations import Evaluations

_AHEAD = (
    "This rank has run {name} for batch {batch} ahead of the batches before it. If it needs the attributes that they "
    "leave behind, use PipeStrategy(stream_evaluation=False)."
)


class EvaluationStream:
    """Stands in the place of a loop's data fetcher, and runs steps ahead of the loop.

    Args:
        evaluations: runs and shares steps.
        batches: of Lightning's loop, which is about to fetch its first one.
        waits: whether each batch passes all ranks before the next one begins, from the first one on.
    """

    def __init__(self, evaluations: Evaluations, batches: FetchedBatches, *, waits: bool) -> None:
        self._evaluations, self._loop, self._name = evaluations, batches.loop, batches.name
        step, pipeline = evaluations.user_step, evaluations.pipeline
        self._module, self._world = step.module, step.world
        self._last = len(pipeline.balance) - 1
        # whether this rank has the last stage, and loads
        self._completes = pipeline.loss_ranks[0] == pipeline.transport.rank
        self._engine = StreamedEvaluation(pipeline)
        self._batches, self._limit, self._waits = batches, 0, waits
        self._changed = ExitStack()
        self._changed.callback(setattr, step.channel, "ahead", step.channel.ahead)
        step.channel.ahead = self._engine.lag
        self._changed.enter_context(replaced(batches.loop, "_data_fetcher", self, gated=False))

    # ------------------------------------------------------------------ the end

    def end(self) -> None:
        """End behind the last batch. Collective over all processes."""
        self.close()
        self._engine.end()

    def close(self) -> None:
        """Leave Lightning as it was found."""
        self._changed.close()

    # ------------------------------------------------------------------ what Lightning's loop asks of a fetcher

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_batches"].fetcher, name)

    @property
    def done(self) -> bool:
        """Whether the batch that was given last is known to be the last one."""
        current = self._batches.current
        return self._batches.fetcher.done if current is None else current.last

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if not self._waits:
            number = self._batches.given
            end, self._limit = self._engine.end_of(number), self._engine.begun(number)
            if self._completes:
                # batches are loaded for the rank that is furthest ahead, which asks for one more behind the report
                self._batches.up_to(self._limit)
            self._run_to(end - 1 if self._completes else end + self._engine.ahead)
        current = self._batches.give()
        return current.batch, current.index, current.loader

    # ------------------------------------------------------------------ steps

    def step(self, args: Sequence[Any]) -> Any:
        """What the step of the current batch returns.

        Args:
            args: its arguments.
        """
        current = self._batches.current
        assert current is not None
        step = self._begun(current)
        if self._waits:
            step = step if current.way is None else self._evaluations.again(step)
            self._evaluations.run(step)
        elif self._completes:
            self._run_to(self._engine.end_of(current.number))
            # the counterparts in other replicas run the same, and may be waited for
            if self._world.layout.data_parallel_size > 1 and self._name != "predict_step":
                [repeats] = self._world.any_of([step.outputs is None], self._world.replica_members)
                step.outputs = None if repeats else step.outputs
        leave = None if self._waits else self._leave
        output = self._evaluations.share(step, send_outputs=self._outputs_are_kept, leave=leave)
        current.step = None
        return output

    def _begun(self, fetched: Fetched) -> StepOfBatch:
        """The step of a batch."""
        if fetched.step is None:
            fetched.step = self._evaluations.begin(self._name, self._batches.arguments(fetched))
        return fetched.step

    def _leave(self) -> None:
        """Let batches wait from now on: bring what has begun to its end, of which nothing counts."""
        self._waits = True
        self._run_to(self._engine.end_of(self._limit - 1))
        self._engine.end()
        rank_zero_info(
            f"{self._name}: each batch passes all ranks before the next one begins, because a step comes back to "
            "layers that it has called, or gives them what an earlier batch has changed."
        )

    @property
    def _outputs_are_kept(self) -> bool:
        """Whether anything behind the step looks at what it returned: no hook of the user's where none must wait."""
        callbacks = self._module.trainer.callbacks
        writers = any(isinstance(each, pl.callbacks.BasePredictionWriter) for each in callbacks)
        return self._waits or (self._name == "predict_step" and (self._loop.return_predictions or writers))

    def _run_to(self, slot: int) -> None:
        """Run what the order has for this rank up to a slot, of the batches that have begun."""
        for action in self._engine.up_to(slot):
            number = action.micro_batch or 0
            fetched = self._batches.find(number) if number < self._limit else None
            if fetched is not None:  # else the data has ended before
                self._perform(action, fetched)

    def _perform(self, action: Action, fetched: Fetched) -> None:
        """Run an action of a batch that has been fetched."""
        begins, step = fetched.step is None, self._begun(fetched)
        if begins:
            fetched.way = self._engine.begin(fetched.number, step, step.args[0], seed=step.seed)
        perform = partial(self._engine.perform, action)
        if action.kind is not Kind.FORWARD:
            perform()
            return
        step.dropped = self._waits and action.stage == self._last
        try:
            self._evaluations.run_stage(step, action.stage, perform)
        except Exception as error:
            if fetched.number > self._batches.given:  # never in the last stage
                error.add_note(_AHEAD.format(name=self._name, batch=fetched.number))
            raise
        step.outputs = None if fetched.way.repeats else fetched.way.results
