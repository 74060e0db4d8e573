"""The evaluation step of one batch, in two parts: run on this rank, and shared with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning_pipe.batches.joining import join
from lightning_pipe.batches.micro_batches import MicroBatches, divide_batch
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.trainer.data.batch_splitter import BatchSplitting
from lightning_pipe.trainer.user_step import StepOfBatch, UserStep


@dataclass
class RunStep:
    """A step that this rank runs, and has not shared yet.

    Args:
        step: the step.
        name: the method of the LightningModule.
        args: its arguments.
        seed: of the batch's random streams.
        outputs: what the pipeline returned on this rank.
        before: the attributes before it, from `UserStep.running`.
        repeats: whether it has ended here since it has to run in turns.
        layers: what was in layers before each run that has changed it.
        again: whether it has run before.
    """

    step: StepOfBatch
    name: str
    args: Sequence[Any]
    seed: int
    outputs: dict[int, Any] = field(default_factory=dict)
    before: Snapshot | None = None
    repeats: bool = False
    layers: list[Snapshot] = field(default_factory=list)
    again: bool = False


class EvaluationSteps:
    """Runs evaluation steps once over the whole batch: their code sees what it would see on one device.

    Batches that do not fit are cut into micro-batches, if the user asks for it.

    Args:
        pipeline: the module over the ranks.
        user_step: what the steps of all batches have in common.
        seeds: of the random streams of batches.
        options: the strategy's options for batches.

    Attributes:
        waiting: the methods of which a batch has had to run again: each waits for the batches before it.
    """

    def __init__(self, pipeline: Pipeline, user_step: UserStep, seeds: Iterator[int], options: BatchSplitting) -> None:
        self.pipeline, self.user_step, self.options = pipeline, user_step, options
        self._seeds, self.waiting = seeds, set[str]()
        self._in_turns = set[str]()  # those in which the ranks take turns, because they call layers again
        # what each run has changed in layers since the last batch that was run in turns; the methods that change none
        self._before: list[Snapshot] = []
        self._leaves_layers: set[str] = set()

    def begin(self, name: str, args: Sequence[Any], seed: int | None = None) -> RunStep:
        """The step of the next batch.

        Args:
            name: the method of the LightningModule.
            args: its arguments; the first one is the batch, on this device.
            seed: of the batch's random streams; ``None``: the next one.
        """
        batch, *rest = args
        seed = next(self._seeds) if seed is None else seed
        parts = self._cut(batch)
        # several pipes share the micro-batches of a batch; one micro-batch takes the first of them
        ranks = self.pipeline.loss_ranks[: len(parts.parts)]
        step = StepOfBatch(self.user_step, name, rest, parts, ranks)
        return RunStep(step, name, args, seed)

    def run(self, run: RunStep) -> None:
        """Run this rank's part of a step, on all ranks before any of them goes on to the next batch."""
        turns, parts = run.name in self._in_turns, run.step.micro_batches.parts
        with (
            nullcontext() if turns else self._remembering(run),
            self.user_step.running(may_repeat=not turns, turns=turns, ranks=run.step.ranks) as run.before,
        ):
            run.outputs = self.pipeline.evaluate(run.step, parts, seed=run.seed, turns=turns, again=run.again)
        run.repeats = self.pipeline.turns.needed

    def run_stage(self, run: RunStep, stage: int, perform: Callable[[], None]) -> None:
        """Run one stage of a step.

        Args:
            run: the step.
            stage: the stage, of this rank.
            perform: runs it.
        """
        ranks = run.step.ranks if stage == len(self.pipeline.balance) - 1 else ()
        with self._remembering(run), self.user_step.running(may_repeat=True, ranks=ranks) as run.before:
            perform()

    @contextmanager
    def _remembering(self, run: RunStep) -> Iterator[None]:
        """Around a run that may have to be undone: remember what it changes in layers and outside modules.

        Not what others change there meanwhile: other stages here are at work on other batches, which stay, and what the
        step sets is adopted batch by batch.
        """
        if run.name in self._leaves_layers:
            yield
            return
        computing = self.pipeline.executor.stages.interceptor.computing()
        before = Snapshot({str(id(part)): part for part in computing})
        yield
        if before.narrow():
            run.layers.append(before)
            self._before.append(before)

    def _cut(self, batch: Any) -> MicroBatches:
        options, number = self.options, self.options.evaluation_micro_batches
        if number == 1:
            return MicroBatches([batch], [1], [1.0])
        ranks = self.pipeline.transport.topology.ranks
        return divide_batch(batch, ranks, number, options.split_batch, options.loss_weight)

    def again(self, run: RunStep) -> RunStep:
        """A step that is to run once more."""
        run = self.begin(run.name, run.args, run.seed)
        run.again = True
        return run

    def share(self, run: RunStep, *, send_outputs: bool = True, leave: Callable[[], None] | None = None) -> Any:
        """What the step returned; what it logged and changed is made on this rank, too. Collective over the pipeline.

        Args:
            run: the step, which has been run here.
            send_outputs: whether ranks without the last stage get what the step returned.
            leave: called if a step that was run in a stream has to run again, whose batches wait from then on.
        """
        outputs = run.step.share(run.outputs, run.before, send_outputs=send_outputs, repeats=run.repeats)
        while run.step.repeats:
            self.waiting.add(run.name)
            if leave is None:
                self._in_turns.add(run.name)
            else:
                leave()
            leave = None
            # the layers have run for this batch, and in a stream for later ones, whose steps all run again
            for before in reversed(self._before):
                before.undo()
            self._before.clear()
            self._leaves_layers.discard(run.name)
            run = self.again(run)
            self.run(run)
            outputs = run.step.share(run.outputs, run.before, send_outputs=send_outputs, repeats=run.repeats)
        if run.layers:
            self._before = [each for each in self._before if each not in run.layers]
        elif run.name not in self._in_turns:
            self._leaves_layers.add(run.name)
        parts = run.step.micro_batches
        if len(parts.parts) == 1 or not outputs:
            return outputs.get(0)
        return join(outputs, parts.sizes, parts.shares, _unclear)


def _unclear(place: str) -> None:
    raise ConfigurationError(
        f"The step returns outputs{place}, of which it is not known how the values of micro-batches make that of the "
        "batch.",
        hint="Return tensors or lists with one entry for each sample, or means over samples; or leave out "
        "evaluation_micro_batches.",
    )
