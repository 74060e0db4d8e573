"""The evaluation step of one batch, in two parts: run on this rank, and shared with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from lightning.pytorch.plugins.precision import Precision

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.trainer.broadcasts import Broadcast
from lightning_pipe.trainer.data.micro_batches import MicroBatches
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

    Args:
        pipeline: the module over the ranks.
        user_step: what the steps of all batches have in common.
        precision: the Trainer's precision plugin.
        seeds: of the random streams.
    """

    def __init__(self, pipeline: Pipeline, user_step: UserStep, precision: Precision, seeds: Seeds) -> None:
        self.pipeline, self.user_step = pipeline, user_step
        self._seeds = seeds
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
        batch, *rest = args
        step = self.user_step.begin(name, rest, self._contexts[name], MicroBatches([batch], [1], [1.0]))
        with self.user_step.running(may_repeat=not turns) as before:
            outputs = self.pipeline.evaluate(step, [batch], seed=seed, ahead=ahead, turns=turns)
        return RunStep(step, outputs, before, self.pipeline.turns.needed, name, args, seed)

    def share(self, run: RunStep, broadcast: Broadcast | None = None, *, send_outputs: bool = True) -> Any:
        """What the step returned, after its traces have been made on this rank. Collective over the pipeline.

        Args:
            run: what `run` returned.
            broadcast: sends objects within the pipeline; by default the others wait for those that report.
            send_outputs: whether ranks without the last stage get what the step returned.
        """
        shared = run.step.share(run.outputs, run.before, broadcast, send_outputs=send_outputs, repeats=run.repeats)
        if not run.step.repeats:
            return shared.get(0)
        self.user_step.take_turns(run.name)
        # all ranks have come to this batch: here they run it together, whatever they have begun of later ones
        again = self._run(run.name, run.args, run.seed, 0, turns=True)
        return again.step.share(again.outputs, again.before, broadcast, send_outputs=send_outputs).get(0)
