"""An evaluation loop whose batches follow each other through the stages.

Lightning's loop fetches a batch, evaluates it and calls the hooks behind it, on every rank. In a stream the ranks run
their part of later batches before the loop asks for them. What Lightning does with a batch stays in order, with the
step's outputs, on all ranks. What a rank runs follows one order for all ranks, `EvaluationOrder`. Three ranks, the
batches that they run, and between bars what the loops are at::

    rank 2 (stage 0)   0 1 2 3 |0| 4 |1| 5 |2| 6 ...
    rank 1 (stage 1)     0 1 2 |0| 3 |1| 4 |2| 5 ...
    rank 0 (stage 2)         0 |0| 1 |1| 2 |2| 3 ...     loads batch 4 before it evaluates batch 0

The rank with the last stage, which also loads the batches, sends them, and a report of every batch, without waiting for
the others. Before it evaluates a batch in its loop, it runs what the order has before the end of the batch. The other
ranks go on to a few slots behind that end (`EvaluationOrder.ahead`), and then wait for the report: whatever they wait
for before is sent by a rank that has got as far in the order without that report.

A run of the step may read what an earlier batch changes. So the first batch is alone. If it has changed an attribute,
more than that lists have grown, batches wait for each other from then on: where every rank holds one stage, each rank
by itself runs no batch ahead, as the messages of all batches keep their order. Where a rank holds several stages, or
replicas wait for each other, all ranks agree, and no other batch begins in the order. No other begins either once a
step comes back to layers that it has called: then the batches that have begun run again, in turns. What later batches
change all the same may be read too early: stages compare what they give to layers, and a difference is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_pipe.engine.streamed_evaluation import StreamedEvaluation
from lightning_pipe.patches import replaced
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.trainer.evaluation.conditions import tell_that_batches_wait
from lightning_pipe.trainer.evaluation.fetched import Fetched, FetchedBatches
from lightning_pipe.trainer.evaluation.steps import EvaluationSteps
from lightning_pipe.trainer.world import World


@dataclass
class Steadiness:
    """What earlier evaluations by one method have shown, on this rank.

    Args:
        known: whether a batch has come to its end.
        steady: whether it changed nothing that later batches may read.
    """

    known: bool = False
    steady: bool = True


_AHEAD = (
    "This rank has run {name} for batch {batch} ahead of the batches before it. If it needs the attributes that they "
    "leave behind, use PipeStrategy(stream_evaluation=False)."
)


class EvaluationStream:
    """Stands in the place of a loop's data fetcher, and runs steps ahead of the loop.

    Args:
        module: the LightningModule, with its Trainer.
        steps: runs and shares steps.
        world: the processes.
        loop: Lightning's loop, about to fetch its first batch.
        name: the method that evaluates a batch.
        steadiness: what is known of the method, and is to be kept.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        steps: EvaluationSteps,
        world: World,
        loop: Any,
        name: str,
        steadiness: Steadiness,
    ) -> None:
        self._module, self._steps, self._loop, self._name = module, steps, loop, name
        self._known = steadiness
        pipeline, self._last = steps.pipeline, len(steps.pipeline.balance) - 1
        ranks = [pipeline.placement[0, stage] for stage in range(self._last + 1)]
        self._stages = [stage for stage, rank in enumerate(ranks) if rank == pipeline.transport.rank]
        # the counterparts in other replicas may be waited for; in predictions nothing is
        replicas, several = world.layout.data_parallel_size > 1 and name != "predict_step", len({*ranks}) <= self._last
        self._deciding = world.everyone if replicas else pipeline.pipeline_members if several else ()
        self._engine = StreamedEvaluation(pipeline, alone=bool(self._deciding) and not steadiness.known)
        if self._deciding and not steadiness.steady:
            self._engine.order.close()
        self._batches = FetchedBatches(module, steps, loop, name)
        self._slot = 0
        self._changed = ExitStack()

    @property
    def _completes(self) -> bool:
        """Whether this rank has the last stage, and loads."""
        return self._last in self._stages

    # ------------------------------------------------------------------ beginning and end

    def begin(self) -> None:
        """Take the place of the fetcher."""
        channel = self._steps.user_step.channel
        self._changed.callback(setattr, channel, "ahead", channel.ahead)
        channel.ahead = self._engine.lag
        self._changed.enter_context(replaced(self._loop, "_data_fetcher", self, gated=False))
        self._changed.enter_context(replaced(self._module.trainer.strategy, "batch_to_device", self._transferred))
        arguments = self._batches.arguments_of_current
        self._changed.enter_context(replaced(self._loop, "_build_step_args_from_hook_kwargs", arguments))

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
        self._look_back()
        number = self._batches.given
        if self._engine.order.holds(number):
            self._slot = self._engine.proceed()
            if self._completes:
                # batches are loaded for the rank that is furthest ahead, which asks for one more behind the report
                self._batches.up_to(self._engine.order.begun)
            self._run_to(self._slot - 1 if self._completes else self._slot + self._engine.order.ahead)
        current = self._batches.give()
        return (self._batches.moved(current), *current.item[1:])

    def _transferred(self, *_: Any, **__: Any) -> Any:
        """In the place of the strategy's ``batch_to_device``: the loop's current batch is there already."""
        assert self._batches.current is not None
        return self._batches.current.batch

    # ------------------------------------------------------------------ steps

    def step(self, args: Sequence[Any]) -> Any:
        """What the step of the current batch returns.

        Args:
            args: its arguments.
        """
        current = self._batches.current
        assert current is not None
        run = self._batches.begun(current)
        in_turns = self._name in self._steps.user_step.in_turns
        if not self._engine.order.holds(current.number):
            self._steps.run(run)
        else:
            if self._completes:
                self._run_to(self._slot)
            # what was begun before the first batch that had to be run in turns: so are all behind it
            run.repeats |= in_turns
        output = self._steps.share(run, send_outputs=self._outputs_are_kept)
        if self._name in self._steps.user_step.in_turns:
            self._engine.order.close()
        current.run = None
        return output

    @property
    def _outputs_are_kept(self) -> bool:
        """Whether anything behind the step looks at what it returned: of the user's hooks none does in a stream."""
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        writers = any(isinstance(each, pl.callbacks.BasePredictionWriter) for each in callbacks)
        return self._name == "predict_step" and (self._loop.return_predictions or writers)

    def _run_to(self, slot: int) -> None:
        """Run what the order has for this rank up to a slot, as far as it may be ahead of the loop."""
        next_one = self._batches.given
        while True:
            ahead = self._known.known and self._known.steady
            action = self._engine.due(slot, None if ahead else next_one)
            if action is None:
                return
            fetched = self._batches.find(action.micro_batch or 0)
            if fetched is not None:  # else the data has ended before
                self._perform(action, fetched)

    def _perform(self, action: Action, fetched: Fetched) -> None:
        """Run an action of a batch that has been fetched."""
        if fetched.run is None:
            run = self._batches.begun(fetched)
            fetched.way = self._engine.begin(fetched.number, run.step, run.args[0], seed=run.seed)
        run, perform = self._batches.begun(fetched), partial(self._engine.perform, action)
        if action.kind is not Kind.FORWARD:
            perform()
            return
        if not self._known.steady:
            self._steps.user_step.attributes.of_layers.begin_batch()
        if action.stage == self._last:
            self._steps.run_stage(run, action.stage, perform)
        else:
            try:
                with self._batches.as_if_at(fetched):
                    self._steps.run_stage(run, action.stage, perform)
            except Exception as error:
                if fetched.number > self._batches.given:
                    error.add_note(_AHEAD.format(name=self._name, batch=fetched.number))
                raise
        if action.stage == self._stages[-1]:
            run.outputs, run.repeats = fetched.way.results, fetched.way.repeats

    def _look_back(self) -> None:
        """After the first batch: see whether it has changed what later ones may read."""
        if self._batches.current is None or self._known.known:
            return
        changed, transport = self._steps.user_step.attributes.changed_by_batch, self._steps.pipeline.transport
        if self._deciding:
            found = transport.all_gather_object(changed, self._deciding)
            changed = next((each for each in found if each is not None), None)
            if changed is not None:
                self._engine.order.close()
        self._known.known, self._known.steady = True, changed is None
        if changed is not None and transport.process == 0:
            tell_that_batches_wait(self._name, f"the step changes `{changed}`")
