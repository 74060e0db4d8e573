"""The evaluation step of one batch, in two parts: run on this rank, and shared with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning_pipe.batches.joining import join
from lightning_pipe.batches.micro_batches import MicroBatches, divide_batch
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.trainer.data.batch_splitter import BatchSplitting
from lightning_pipe.trainer.user_step import StepOfBatch, UserStep


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
        self._before: list[tuple[StepOfBatch, Snapshot]] = []
        self._leaves_layers: set[str] = set()

    def begin(self, name: str, args: Sequence[Any], seed: int | None = None) -> StepOfBatch:
        """The step of the next batch.

        Args:
            name: the method of the LightningModule.
            args: its arguments; the first one is the batch, on this device.
            seed: of the batch's random streams; ``None``: the next one.
        """
        seed = next(self._seeds) if seed is None else seed
        parts = self._cut(args[0])
        # several pipes share the micro-batches of a batch; one micro-batch takes the first of them
        ranks = self.pipeline.loss_ranks[: len(parts.parts)]
        return StepOfBatch(self.user_step, name, args, parts, seed, ranks)

    def run(self, step: StepOfBatch) -> None:
        """Run this rank's part of a step, on all ranks before any of them goes on to the next batch."""
        turns, parts = step.name in self._in_turns, step.micro_batches.parts
        with (
            nullcontext() if turns else self._remembering(step),
            self.user_step.running(may_repeat=not turns, turns=turns, ranks=step.ranks) as step.before,
        ):
            step.outputs = self.pipeline.evaluate(step, parts, seed=step.seed, turns=turns, again=step.again)
        step.repeats = self.pipeline.turns.needed

    def run_stage(self, step: StepOfBatch, stage: int, perform: Callable[[], None]) -> None:
        """Run one stage of a step.

        Args:
            step: the step.
            stage: the stage, of this rank.
            perform: runs it.
        """
        ranks = step.ranks if stage == len(self.pipeline.balance) - 1 else ()
        with self._remembering(step), self.user_step.running(may_repeat=True, ranks=ranks) as step.before:
            perform()

    @contextmanager
    def _remembering(self, step: StepOfBatch) -> Iterator[None]:
        """Around a run that may have to be undone: remember what it changes in layers and outside modules.

        Not what others change there meanwhile: other stages here are at work on other batches, which stay, and what the
        step sets is adopted batch by batch.
        """
        if step.name in self._leaves_layers:
            yield
            return
        computing = self.pipeline.executor.stages.interceptor.computing()
        before = Snapshot({str(id(part)): part for part in computing})
        yield
        if before.narrow():
            self._before.append((step, before))

    def _cut(self, batch: Any) -> MicroBatches:
        options, number = self.options, self.options.evaluation_micro_batches
        if number == 1:
            return MicroBatches([batch], [1], [1.0])
        ranks = self.pipeline.transport.topology.ranks
        return divide_batch(batch, ranks, number, options.split_batch, options.loss_weight)

    def again(self, step: StepOfBatch) -> StepOfBatch:
        """A step that is to run once more."""
        step = self.begin(step.name, step.args, step.seed)
        step.again = True
        return step

    def share(self, step: StepOfBatch, *, send_outputs: bool = True, leave: Callable[[], None] | None = None) -> Any:
        """What the step returned; what it logged and changed is made on this rank, too. Collective over the pipeline.

        Args:
            step: the step, which has been run here.
            send_outputs: whether ranks without the last stage get what the step returned.
            leave: called if a step that was run in a stream has to run again, whose batches wait from then on.
        """
        outputs = step.share(send_outputs=send_outputs)
        while step.repeats:
            self.waiting.add(step.name)
            if leave is None:
                self._in_turns.add(step.name)
            else:
                leave()
            leave = None
            # the layers have run for this batch, and in a stream for later ones, whose steps all run again
            for _, before in reversed(self._before):
                before.undo()
            self._before.clear()
            self._leaves_layers.discard(step.name)
            step = self.again(step)
            self.run(step)
            outputs = step.share(send_outputs=send_outputs)
        of_others = [each for each in self._before if each[0] is not step]
        if len(of_others) < len(self._before):
            self._before = of_others
        elif step.name not in self._in_turns:
            self._leaves_layers.add(step.name)
        parts = step.micro_batches
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
