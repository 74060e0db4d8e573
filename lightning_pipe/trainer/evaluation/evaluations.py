"""The evaluations of a run: which of them stream, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.kept_state import is_own
from lightning_pipe.parameters.buffer_sync import EvaluatedCopies
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.trainer.evaluation.steps import EvaluationSteps
from lightning_pipe.trainer.evaluation.stream import EvaluationStream
from lightning_pipe.trainer.world import World

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Evaluations:
    """Lets the batches of an evaluation stream through the stages, where nothing between them looks at the others.

    Args:
        module: the LightningModule, with its Trainer.
        world: the processes.
        steps: runs and shares steps.
    """

    def __init__(self, module: pl.LightningModule, world: World, steps: EvaluationSteps) -> None:
        self._module, self._world, self._steps = module, world, steps
        self._may_stream = (
            steps.options.stream_evaluation
            # the micro-batches of a batch follow each other instead
            and steps.options.evaluation_micro_batches == 1
            and world.layout.pipeline_parallel_size > 1
            # before the module is divided one rank runs all of it
            and not steps.pipeline.whole
        )
        pipeline = steps.pipeline
        told: Sequence[str] = ()
        if pipeline.family.pipes > 1:
            whole = steps.options.evaluation_micro_batches == 1
            told = pipeline.evaluated_by(pipeline.transport.rank) if whole else pipeline.names
        not_told = {*pipeline.names}.difference(told)
        self._copies = EvaluatedCopies(module, pipeline.transport, pipeline.pipeline_members, not_told)
        self._stream: EvaluationStream | None = None

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
            for loop, name in loops.items() if len(self._steps.pipeline.pipeline_members) > 1 else ():
                begin = partial(self._begin, loop.on_run_start, loop, name)
                changed.enter_context(replaced(loop, "on_run_start", begin, gated=False))
                changed.enter_context(replaced(loop, "on_run_end", partial(self._end, loop.on_run_end), gated=False))
            yield

    def step(self, name: str, args: Sequence[Any]) -> Any:
        """What the step of a batch returns.

        Args:
            name: the method of the LightningModule.
            args: its arguments; the first one is the batch, on this device.
        """
        if self._stream is not None:
            return self._stream.step(args)
        step = self._steps.begin(name, args)
        self._steps.run(step)
        return self._steps.share(step)

    def _begin(self, method: Callable[..., Any], loop: Any, name: str) -> None:
        """In the place of ``on_run_start``. Collective over all processes."""
        method()
        self._copies.begin()
        if not self._may_stream:
            return
        # a callback may exist on some ranks alone
        if not self._world.agree(self._must_wait(loop, name), unanimous=False):
            self._stream = EvaluationStream(self._module, self._steps, self._world, loop, name)
            self._stream.begin()

    def _must_wait(self, loop: Any, name: str) -> bool:
        """Whether each batch must have passed all ranks before the next one begins."""
        pipeline, loaders = self._steps.pipeline, loop._combined_loader.flattened
        replicas = pipeline.transport.topology.replicas > 1
        return (
            name in self._steps.waiting
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

    def _end(self, method: Callable[..., Any]) -> Any:
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
            self._steps.pipeline.executor.abandon()


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
