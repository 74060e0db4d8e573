"""The evaluation step of one batch, in two parts: run on this rank, and shared with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from lightning.pytorch.plugins.precision import Precision

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.trainer.broadcasts import Broadcast
from lightning_pipe.trainer.data.batch_splitter import BatchSplitting
from lightning_pipe.trainer.data.joining import join
from lightning_pipe.trainer.data.micro_batches import MicroBatches, divide_batch
from lightning_pipe.trainer.data.needs import Needs
from lightning_pipe.trainer.seeds import Seeds
from lightning_pipe.trainer.user_step import StepOfBatch, UserStep


class RunStep(NamedTuple):
    """A step that this rank has run and not shared yet.

    Args:
        step: the step.
        outputs: what the pipeline returned on this rank.
        before: the attributes before it, from `UserStep.running`.
        repeats: whether it has ended here where it comes back to layers of an earlier stage.
        name: the method of the LightningModule.
        args: its arguments.
        seed: of the batch's random streams.
    """

    step: StepOfBatch
    outputs: dict[int, Any]
    before: Snapshot | None
    repeats: bool
    name: str
    args: Sequence[Any]
    seed: int


class EvaluationSteps:
    """Runs evaluation steps once over the whole batch: their code sees what it would see on one device.

    Batches that do not fit are cut into micro-batches, if the user asks for it.

    Args:
        pipeline: the module over the ranks.
        user_step: what the steps of all batches have in common.
        precision: the Trainer's precision plugin.
        seeds: of the random streams.
        options: the strategy's options for batches.
        needs: learns which tensors of a batch each rank needs.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        user_step: UserStep,
        precision: Precision,
        seeds: Seeds,
        options: BatchSplitting,
        needs: Needs,
    ) -> None:
        self.pipeline, self.user_step, self.options, self._needs = pipeline, user_step, options, needs
        self._seeds = seeds
        self._before: dict[str, Snapshot | None] = {}
        """By method, the layers before its first run that may be undone; ``None`` once that has come to its end."""
        self._contexts: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "validation_step": precision.val_step_context,
            "test_step": precision.test_step_context,
            "predict_step": precision.predict_step_context,
        }

    def run(self, name: str, args: Sequence[Any], ahead: int = 0) -> RunStep:
        """Run this rank's part of the step of the next batch.

        Args:
            name: the method of the LightningModule.
            args: its arguments; the first one is the batch, on this device.
            ahead: how many later batches this rank may run before the later ranks have come to this one.
        """
        # in a stream this rank may have begun with later batches before it learns that the step needs turns
        turns = name in self.user_step.in_turns and not ahead
        return self._run(name, args, self._seeds.evaluation(), ahead, turns=turns)

    def _run(self, name: str, args: Sequence[Any], seed: int, ahead: int, *, turns: bool) -> RunStep:
        if not turns and (name not in self._before or name in self.user_step.in_turns):
            # a stream goes on to begin with a run that will be undone, once for each batch
            layers = self.pipeline.layers
            self._before[name] = Snapshot(
                {f"{of}.{part}": each for of, layer in layers for part, each in layer.named_modules()}
            )
        batch, *rest = args
        step = self.user_step.begin(name, rest, self._contexts[name], self._cut(batch))
        with (
            self._needs.learning(name, batch, step.micro_batches.parts),
            self.user_step.running(may_repeat=not turns) as before,
        ):
            outputs = self.pipeline.evaluate(step, step.micro_batches.parts, seed=seed, ahead=ahead, turns=turns)
        return RunStep(step, outputs, before, self.pipeline.turns.needed, name, args, seed)

    def _cut(self, batch: Any) -> MicroBatches:
        options, number = self.options, self.options.evaluation_micro_batches
        if number == 1:
            return MicroBatches([batch], [1], [1.0])
        ranks = self.pipeline.transport.topology.ranks
        return divide_batch(batch, ranks, number, options.split_batch, options.loss_weight)

    def share(self, run: RunStep, broadcast: Broadcast | None = None, *, send_outputs: bool = True) -> Any:
        """What the step returned; what it logged and changed is made on this rank, too. Collective over the pipeline.

        Args:
            run: what `run` returned.
            broadcast: sends objects within the pipeline; by default the others wait for those that report.
            send_outputs: whether ranks without the last stage get what the step returned.
        """
        outputs = run.step.share(run.outputs, run.before, broadcast, send_outputs=send_outputs, repeats=run.repeats)
        before, self._before[run.name] = self._before.get(run.name), None
        if run.step.repeats:
            # the layers have run for this batch, and in a stream for later ones, whose steps all run again
            if before is not None:
                before.undo()
            self.user_step.take_turns(run.name)
            self._needs.keep_whole(run.name)
            # all ranks have come to this batch: here they run it together, whatever they have begun of later ones
            run = self._run(run.name, run.args, run.seed, 0, turns=True)
            outputs = run.step.share(run.outputs, run.before, broadcast, send_outputs=send_outputs)
        parts = run.step.micro_batches
        if len(parts.parts) == 1 or not outputs:
            return outputs.get(0)
        return join(outputs, parts.sizes, parts.shares, {}, _unclear)


def _unclear(place: str) -> None:
    raise ConfigurationError(
        f"The step returns outputs{place}, of which it is not known how the values of micro-batches make that of the "
        "batch.",
        hint="Return tensors or lists with one entry for each sample, or means over samples; or leave out "
        "evaluation_micro_batches.",
    )
