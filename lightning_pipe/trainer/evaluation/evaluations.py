"""The evaluations of a run: their steps, in two parts each, run here and shared; and which of them stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.batches.joining import join
from lightning_pipe.batches.micro_batches import MicroBatches, divide_batch
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.kept_state import is_own
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.parameters.buffer_sync import EvaluatedCopies
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.trainer.evaluation.fetched import FetchedBatches
from lightning_pipe.trainer.evaluation.stream import EvaluationStream
from lightning_pipe.trainer.user_step import StepOfBatch, UserStep

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Evaluations:
    """Runs evaluation steps once over the whole batch: their code sees what it would see on one device.

    Batches that do not fit are cut into micro-batches, if the user asks for it. Others stream through the stages, where
    nothing between them looks at one.

    Args:
        user_step: what the steps of all batches have in common.
        seeds: of the random streams of batches.
        options: the strategy, which has the user's options.
        divide: divides a module that is whole by what the step of that name calls with such arguments, and gives the
            evaluations that go on from there.

    Attributes:
        pipeline: the module over the ranks.
        user_step: as given.
    """

    def __init__(
        self,
        user_step: UserStep,
        seeds: Iterator[int],
        options: PipeStrategy,
        divide: Callable[[str, Sequence[Any]], Evaluations],
    ) -> None:
        self.user_step, self._seeds, self._options, self._divide = user_step, seeds, options, divide
        self._module, self.pipeline, self._world = user_step.module, user_step.pipeline, user_step.world
        # the methods of which a batch has had to run again: each waits for the batches before it
        self._waiting = set[str]()
        self._in_turns = set[str]()  # those in which the ranks take turns, because they call layers again
        # what each run has changed in layers since the last batch that was run in turns; the methods that change none
        self._before: list[tuple[StepOfBatch, Snapshot]] = []
        self._leaves_layers: set[str] = set()
        self._stream: EvaluationStream | None = None
        pipeline = self.pipeline
        told = pipeline.evaluated_by(pipeline.transport.rank) if pipeline.family.pipes > 1 else ()
        not_told = {*pipeline.names}.difference(told)
        self._copies = EvaluatedCopies(self._module, pipeline.transport, pipeline.pipeline_members, not_told)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a run: step in where Lightning's loops are about to fetch their first batch, and behind the last."""
        trainer: Any = self._module.trainer
        loops = dict.fromkeys((trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop), "validation_step")
        loops |= {trainer.test_loop: "test_step", trainer.predict_loop: "predict_step"}
        for loop in loops:
            loop.inference_mode = False  # nobody counts changes in it; Lightning itself leaves it with FSDP, over Gloo
        with ExitStack() as changed:
            changed.callback(self._close)
            for loop, name in loops.items() if self.pipeline.whole or len(self.pipeline.pipeline_members) > 1 else ():
                begin = partial(self._begin_loop, loop.on_run_start, loop, name)
                changed.enter_context(replaced(loop, "on_run_start", begin, gated=False))
                changed.enter_context(
                    replaced(loop, "on_run_end", partial(self._end_loop, loop.on_run_end), gated=False)
                )
            yield

    def step(self, name: str, args: Sequence[Any]) -> Any:
        """What the step of a batch returns.

        Args:
            name: the method of the LightningModule.
            args: its arguments; the first one is the batch, on this device.
        """
        if self._stream is not None:
            return self._stream.step(args)
        step = self.begin(name, args)
        self.run(step)
        return self.share(step)

    # ------------------------------------------------------------------ steps

    def begin(self, name: str, args: Sequence[Any], seed: int | None = None) -> StepOfBatch:
        """The step of the next batch.

        Args:
            name: the method of the LightningModule.
            args: its arguments; the first one is the batch, on this device.
            seed: of the batch's random streams; ``None``: the next one.
        """
        seed = next(self._seeds) if seed is None else seed
        parts, ranks = self._cut(args[0]), self.pipeline.loss_ranks[:1]  # of several pipes the first one evaluates
        may_repeat = name not in self._in_turns
        return StepOfBatch(self.user_step, name, args, parts, seed, ranks, may_repeat=may_repeat)

    def run(self, step: StepOfBatch) -> None:
        """Run this rank's part of a step, on all ranks before any of them goes on to the next batch."""
        turns, parts = step.name in self._in_turns, step.micro_batches.parts
        with (
            nullcontext() if turns else self._remembering(step),
            self.user_step.running(turns=turns, ranks=step.ranks) as step.before,
        ):
            step.outputs = self.pipeline.evaluate(step, parts, seed=step.seed, turns=turns, again=step.again)

    def run_stage(self, step: StepOfBatch, stage: int, perform: Callable[[], None]) -> None:
        """Run one stage of a step.

        Args:
            step: the step.
            stage: the stage, of this rank.
            perform: runs it.
        """
        ranks = step.ranks if stage == len(self.pipeline.balance) - 1 else ()
        with self._remembering(step), self.user_step.running(ranks=ranks) as step.before:
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
        computing = self.pipeline.executor.stages.interceptor.state.root_of
        before = Snapshot({str(id(part)): part for part in computing})
        yield
        if before.narrow():
            self._before.append((step, before))

    def _cut(self, batch: Any) -> MicroBatches:
        options, number = self._options, self._options.evaluation_micro_batches
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
        while (outputs := step.share(send_outputs=send_outputs)) is None:
            self._waiting.add(step.name)
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
        of_others = [each for each in self._before if each[0] is not step]
        if len(of_others) < len(self._before):
            self._before = of_others
        elif step.name not in self._in_turns:
            self._leaves_layers.add(step.name)
        parts = step.micro_batches
        if len(parts.parts) == 1 or not outputs:
            return outputs.get(0)
        return join(outputs, parts.sizes, parts.shares, _unclear)

    # ------------------------------------------------------------------ loops

    def _begin_loop(self, method: Callable[..., Any], loop: Any, name: str) -> None:
        """In the place of ``on_run_start``. Collective over all processes."""
        method()
        batches, evaluations = FetchedBatches(self._module.trainer, loop, name), self
        # a fit is divided by what its training step calls
        if self.pipeline.whole and not self._module.trainer.sanity_checking and (first := batches.find(0)) is not None:
            evaluations = self._divide(name, batches.arguments(first))
        evaluations._begin(batches)

    def _begin(self, batches: FetchedBatches) -> None:
        """Begin a loop, some of whose batches may have been fetched."""
        self._copies.begin()
        may_stream = (
            self._options.stream_evaluation
            # the micro-batches of a batch follow each other instead
            and self._options.evaluation_micro_batches == 1
            and self._world.layout.pipeline_parallel_size > 1
            # before the module is divided one rank runs all of it
            and not self.pipeline.whole
        )
        # a callback may exist on some ranks alone
        waits = not may_stream or self._world.agree(self._must_wait(batches.loop, batches.name), unanimous=False)
        if not waits or batches.begun:
            self._stream = EvaluationStream(self, batches, waits=waits)

    def _must_wait(self, loop: Any, name: str) -> bool:
        """Whether each batch must have passed all ranks before the next one begins."""
        pipeline, loaders = self.pipeline, loop._combined_loader.flattened
        replicas = pipeline.transport.topology.replicas > 1
        return (
            name in self._waiting
            # it may change what the steps of later batches use, such as weights
            or self._has_hooks_between(name)
            # the replicas' loaders may differ in length
            or (replicas and any(isinstance(loader, SharedDataLoader) and loader.compare for loader in loaders))
            # replicas update statistics together; two stages of a rank may update those of one norm
            or ((replicas or not pipeline.linear) and any(norm.training for norm in pipeline.norms))
            or _share_modules(pipeline)
        )

    def _has_hooks_between(self, name: str) -> bool:
        """Whether a hook is called for every batch that is not Lightning's own."""
        trainer: Any = self._module.trainer
        stage = name.removesuffix("_step")
        hooks = (f"on_{stage}_batch_start", f"on_{stage}_batch_end")
        found = (getattr(owner, hook) for hook in hooks for owner in (self._module, *trainer.callbacks))
        # Lightning's own look at the batch and the Trainer alone
        if any(not str(getattr(hook, "__module__", "")).startswith("lightning.pytorch.") for hook in found):
            return True
        owners = [owner for owner in (self._module, trainer.datamodule) if owner is not None]
        return any(is_overridden(hook, owner) for hook in _TRANSFERS for owner in owners)

    def _end_loop(self, method: Callable[..., Any]) -> Any:
        """In the place of ``on_run_end``. Collective over all processes."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
        self._copies.end()
        return method()

    def _close(self) -> None:
        """Drop a stream whose loop has failed."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            self.pipeline.executor.abandon()


def _unclear(place: str) -> None:
    raise ConfigurationError(
        f"The step returns outputs{place}, of which it is not known how the values of micro-batches make that of the "
        "batch.",
        hint="Return tensors or lists with one entry for each sample, or means over samples; or leave out "
        "evaluation_micro_batches.",
    )


def _share_modules(pipeline: Pipeline) -> bool:
    """Whether a late stage of a rank may run a module for a batch when an early one has run it for later batches."""
    users: dict[tuple[int, int], int] = {}
    for stage, span in enumerate(pipeline.stage_layers):
        for part in (part for number in span for part in pipeline.layers[number][1].modules()):
            key = (pipeline.placement[0, stage], id(part))
            # those of torch do not change in evaluation mode
            if is_own(part) and users.setdefault(key, stage) != stage:
                return True
    return False
