"""The user's step: run for every micro-batch on every rank, and its consequences shared with all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.batches.outputs import losses_on_host
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError, CutError, RepeatedRunError
from lightning_pipe.intercept.digest import GivenOtherValuesError
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.snapshot import Change, Snapshot
from lightning_pipe.plain.step_traces import StepTraces, TracesOfBatch
from lightning_pipe.trainer.whole_model.logging import Log, Logged, Merged, combine, single_value
from lightning_pipe.trainer.whole_model.metrics import Metrics
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.nonblocking_broadcast import REPORTS, NonBlockingBroadcast

_SETTINGS = (bool, int, float, str, tuple)  # of optimizers; a tensor stays where it is
_CONTEXTS = {"training_step": "train_step_context", "validation_step": "val_step_context"}  # of plugins (Lightning 2.6)


@dataclass
class StepReport:
    """What one rank with the last stage reports about a batch.

    Args:
        outputs: what the step returned for each micro-batch; ``None`` if nobody looks at it.
        logged: what the step logged.
        changes: what the step changed in the attributes of the LightningModule.
        asked: whether this rank was asked to stop the training, and by signals to end, and to save and be requeued.
        repeats: whether the step has ended since it has to run in another way.
        hooks: those on modules that the step has left, by their places among all that it has registered.
        settings: of the optimizers' groups, which the step may set behind the layers.
    """

    outputs: dict[int, Any] | None
    logged: list[Merged]
    changes: list[Change]
    asked: list[bool]
    repeats: bool = False
    hooks: tuple[int, ...] = ()
    settings: list[dict[str, Any]] = field(default_factory=list)


def known_outputs(reports: Sequence[StepReport]) -> dict[int, Any]:
    """What the step returned for each micro-batch, as far as it was sent to this rank."""
    return {index: output for report in reports for index, output in (report.outputs or {}).items()}


def losses_of(outputs: Mapping[int, Any]) -> dict[int, float]:
    """The losses that a step returned, by micro-batch; an evaluation may return anything."""
    given = {index: each.get("loss", each) if isinstance(each, Mapping) else each for index, each in outputs.items()}
    return {index: value.item() for index, each in given.items() if (value := single_value(each)) is not None}


class UserStep:
    """What the steps of all batches of a run have in common.

    Every rank runs the user's step, and on most ranks a run of it ends early. What such a run did to attributes,
    metrics and logged values is undone. What the complete run did is repeated on the other ranks before any hook
    outside the step can see it.

    Args:
        pipeline: runs the steps of the LightningModule.
        world: the processes.
        channel: sends reports within the pipeline.

    Attributes:
        metrics: the module's torchmetrics.
        log: records and replays logged values.
        traces: what runs of the step leave behind.
        world, channel: as given.
    """

    def __init__(self, pipeline: Pipeline, world: World, channel: NonBlockingBroadcast) -> None:
        self.module: Any = pipeline.module
        self.pipeline, self.metrics = pipeline, Metrics(pipeline, world)
        self.log = Log(self.module, self.metrics.names)
        self.traces = StepTraces(pipeline)
        self.world, self.channel = world, channel

    @contextmanager
    def running(self, *, turns: bool = False, ranks: Sequence[int] | None = None) -> Iterator[Snapshot | None]:
        """Around the pipeline's call of steps. Yields the attributes before, or ``None`` where nobody needs changes.

        Args:
            turns: whether the ranks take turns: each runs the whole step.
            ranks: those that complete it; ``None``: all with the last stage.
        """
        completes = self.pipeline.transport.rank in (self.pipeline.loss_ranks if ranks is None else ranks)
        several = len(self.pipeline.pipeline_members) > 1
        before = self.traces.capture() if completes and several else None
        # most ranks leave the step early: collectives of the user's step must concern the replicas alone
        self.world.local, self.metrics.alike = True, turns
        try:
            yield before
        except GivenOtherValuesError as error:
            own = [] if before is None else [change.written for change in before.changes()]
            raise error.naming([*own, *self.traces.of_layers.changed()]) from None
        finally:
            self.world.local = False

    def exchange(
        self, report: StepReport | None, ranks: Sequence[int], *, send_outputs: bool = True
    ) -> list[StepReport]:
        """The reports of the ranks that complete the steps. Collective over the pipeline.

        Args:
            report: this rank's report; ``None`` on any other rank.
            ranks: those that complete the steps.
            send_outputs: whether ranks without the last stage get what the step returned.
        """
        sent = report if report is None or send_outputs else replace(report, outputs=None)
        reports = [self.channel.share(sent, self.pipeline.transport.peers[rank], REPORTS) for rank in ranks]
        self.channel.end_batch()
        return reports if report is None else [report if each is sent else each for each in reports]

    def asked(self, training: bool) -> list[bool]:
        """For a report: whether to stop the training, and what signals ask for; in training alike in all replicas."""
        trainer: Any = self.module.trainer
        if not training:
            return [trainer.should_stop, False, False]
        return self.world.any_counterpart([trainer.should_stop, *self.world.signals.asked])

    def take_over(self, reports: Sequence[StepReport], *, training: bool) -> None:
        """Stop the training if a report asks for it; act on signals before the next batch."""
        trainer: Any = self.module.trainer
        stop, *told = [any(flags) for flags in zip(*[each.asked for each in reports], strict=True)]
        trainer.should_stop = trainer.should_stop or stop
        if training:
            self.world.signals.told = told


class StepOfBatch:
    """The step of one batch: called for its micro-batches, then shared with all ranks of the pipeline.

    Args:
        user_step: what the steps of all batches have in common.
        name: the method of the LightningModule.
        args: its arguments; the first one is the batch.
        micro_batches: the batch, cut.
        seed: of the batch's random streams.
        ranks: those that complete it; ``None``: all with the last stage.
        may_repeat: see `TracesOfBatch`.

    Attributes:
        name, args, micro_batches, seed, ranks: as given.
        outputs: what the pipeline returned on this rank; ``None``: the step has to run in another way, since it has
            come back to an earlier stage, say.
        before: the attributes before it, from `UserStep.running`.
        dropped: whether nothing counts any more that it does: its batch runs again.
        again: whether it has run before, in another way.
    """

    dropped = again = False
    before: Snapshot | None = None

    def __init__(
        self,
        user_step: UserStep,
        name: str,
        args: Sequence[Any],
        micro_batches: MicroBatches,
        seed: int,
        ranks: Sequence[int] | None = None,
        *,
        may_repeat: bool = False,
    ) -> None:
        self.name, self.args, self.micro_batches, self.seed = name, args, micro_batches, seed
        self.outputs: dict[int, Any] | None = {}
        self.ranks = user_step.pipeline.loss_ranks if ranks is None else ranks
        self._user_step = user_step
        trainer: Any = user_step.module.trainer
        self._method = getattr(user_step.module, name)
        self._context = getattr(trainer.precision_plugin, _CONTEXTS.get(name, f"{name}_context"))
        self._shares = micro_batches.shares if len(micro_batches.parts) > 1 else None
        self._training = name == "training_step"
        self._logged: Logged = {}
        self._settings: list[dict[str, Any]] = []
        self._groups = [group for each in trainer.optimizers for group in each.param_groups] if self._training else []
        self._traces = TracesOfBatch(len(micro_batches.parts), may_repeat=may_repeat)

    def __call__(self, index: int, part: Any) -> Any:
        """Run the user's step for one micro-batch.

        The pipeline ends the run by an exception where another rank goes on.

        Args:
            index: of the micro-batch.
            part: the micro-batch.
        """
        if self.dropped:
            raise CutError("internal error: the batch runs again.")
        common = self._user_step
        common.metrics.share = self._shares[index] if self._shares else None
        # an evaluation of one micro-batch has what was there before its batch, as every run is undone
        before = None if self._training or self._shares or is_recomputing() else self.before
        with common.log.recording(self._logged, index):
            return common.traces.run_or_undo(lambda: self._run(part), self._traces, before, lambda: common.metrics)

    def _run(self, part: Any) -> Any:
        pipeline = self._user_step.pipeline
        with self._context():
            if not pipeline.synchronous:  # between its runs, hooks set those of other batches
                self._note_settings(anew=True)
            try:
                result = self._method(part, *self.args[1:])
            except StopIteration as error:
                # Lightning's loop would take it for the end of the data (2.6), on this rank alone
                raise ConfigurationError(
                    f"{self._method.__name__} raises StopIteration: an iterator that it takes from has ended.",
                    hint="Give next() a default, or let the items come with the batch (CombinedLoader).",
                ) from error
            self._note_settings()
            # here: a run that still waits for what other ranks send must not count as complete
            pipeline.returning(result)
        return result

    def _note_settings(self, *, anew: bool = False) -> None:
        """Note what a training step has set in groups of optimizers; each of its runs must leave the same."""
        settings = [{key: v for key, v in group.items() if isinstance(v, _SETTINGS)} for group in self._groups]
        if not anew and self._settings not in ([], settings):
            raise RepeatedRunError(
                "each run of the step changes a setting of an optimizer, such as its learning rate, for later runs.",
                hint="Change it in on_train_batch_end, or let Lightning step the scheduler (interval='step').",
            )
        self._settings = settings

    def share(self, *, send_outputs: bool = True) -> dict[int, Any] | None:
        """Exchange, adopt and replay what the step of this batch did. Collective over the pipeline.

        Args:
            send_outputs: whether ranks without the last stage get what the step returned.

        Returns:
            What the step returned for each micro-batch, as far as this rank knows it; ``None``: it has to run again.
        """
        common = self._user_step
        report = None
        if common.pipeline.transport.rank in self.ranks:
            report = StepReport({}, [], [], [], repeats=True)
            if self.outputs is not None:
                report = self.report(self.outputs, common.traces.changes(self.before))
        reports = common.exchange(report, self.ranks, send_outputs=send_outputs)
        if any(each.repeats for each in reports):
            self._traces.undo()
            return None
        common.traces.adopt([each.changes for each in reports], self.before)
        for group, settings in zip(self._groups, reports[0].settings, strict=False):
            group.update(settings)
        self.replay(reports)
        common.take_over(reports, training=self._training)
        return known_outputs(reports)

    def report(self, outputs: dict[int, Any], changes: list[Change]) -> StepReport:
        """What this rank, which has the last stage, reports to the others.

        Args:
            outputs: what the step returned for each micro-batch.
            changes: what steps changed in the attributes of the LightningModule.
        """
        common, amounts = self._user_step, self.micro_batches.amounts
        outputs = losses_on_host(outputs, common.pipeline) if self._training else outputs
        losses = losses_of(outputs) if self.micro_batches.summed else {}
        # what is logged is weighted as the losses are
        logged = common.log.merge(self._logged, self.micro_batches.sizes, amounts, losses)
        asked, hooks = common.asked(self._training), self._traces.left()
        return StepReport(outputs, logged, changes, asked, hooks=hooks, settings=self._settings)

    def replay(self, reports: Sequence[StepReport], *, own_batch: bool = True) -> None:
        """Log for the whole batch what the step logged on the ranks with the last stage; have the hooks that it left.

        Args:
            reports: of all these ranks.
            own_batch: whether it is the batch that the Trainer takes the number of samples from.
        """
        log, parts = self._user_step.log, self.micro_batches
        self._traces.put_back(max([report.hooks for report in reports], key=len))
        merged = combine([one for report in reports for one in report.logged])
        for one in merged:
            one.reduction = "sum" if parts.summed and one.is_loss else one.reduction
        log.replay(merged, len(parts.parts), self._user_step.pipeline.transport.device, own_batch=own_batch)
