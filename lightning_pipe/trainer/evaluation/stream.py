"""An evaluation loop whose batches follow each other through the stages.

Lightning's loop fetches a batch, evaluates it and calls the hooks behind it, on every rank. In a stream the ranks run
their part of later batches before the loop asks for them. What Lightning does with a batch stays in order, with the
step's outputs, on all ranks. Three ranks, the batches that they run, and between bars what the loops are at::

    rank 2 (stage 0)   0 1 2 3 |0| 4 |1| 5 |2| 6 ...
    rank 1 (stage 1)     0 1 2 |0| 3 |1| 4 |2| 5 ...
    rank 0 (stage 2)         0 |0| 1 |1| 2 |2| 3 ...     loads batch 4 before it evaluates batch 0

The last stage, which also loads the batches, sends them, and a report of every batch, without waiting for the others.
Stage ``s`` of ``p`` runs at most ``p - s`` batches ahead: one more than it takes to keep all ranks busy.

How far a rank runs ahead is its own decision, because the messages of all batches keep their order. A rank whose run of
the step reads attributes waits for the end of the first batch: if the batch has changed what was read, the rank runs
no batch ahead from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.broadcasts import STREAMED_BATCHES, STREAMED_REPORTS
from lightning_pipe.trainer.evaluation.conditions import tell_that_batches_wait
from lightning_pipe.trainer.evaluation.reads import AttributeReads, ReadState
from lightning_pipe.trainer.evaluation.steps import EvaluationSteps, RunStep
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.nonblocking_broadcast import NonBlockingBroadcast

_NOT_YET = object()
_LEAST = 2
"""Batches that the rank before the last one may be ahead."""


@dataclass
class Steadiness:
    """What earlier evaluations by one method have shown, on this rank.

    Args:
        known: whether a batch has come to its end.
        steady: whether it left alone what the step reads before it leaves this rank.
    """

    known: bool = False
    steady: bool = True


@dataclass
class _Fetched:
    """A batch that has been fetched.

    Args:
        item: what the fetcher gave: the batch, its number and that of its loader.
        last: whether the fetcher knew that it is the last one.
        batch: the batch on this device.
        run: its step, if this rank has run it.
        state: what that run has read.
        early: whether it was run before the batch before it was at its end.
    """

    item: tuple[Any, int, int]
    last: bool
    batch: Any = _NOT_YET
    run: RunStep | None = None
    state: ReadState | None = None
    early: bool = False


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
        self._module, self._steps, self._world, self._loop, self._name = module, steps, world, loop, name
        self._steadiness = steadiness
        self._fetcher = loop._data_fetcher
        pipeline = steps.pipeline
        (stage,), stages = pipeline.stages_here, len(pipeline.balance)
        self._ahead = 0 if pipeline.is_loss_rank else stages - stage
        self._reads = AttributeReads(steps.user_step.attributes.tracked.modules)
        self._batches = NonBlockingBroadcast(pipeline.transport, stages + 2, STREAMED_BATCHES)
        self._reports = NonBlockingBroadcast(pipeline.transport, stages + 2, STREAMED_REPORTS)
        self._queue: deque[_Fetched] = deque()
        self._current: _Fetched | None = None
        self._end: Exception | None = None
        self._changed = ExitStack()

    # ------------------------------------------------------------------ beginning and end

    def begin(self) -> None:
        """Take the place of the fetcher."""
        self._changed.enter_context(replaced(self._loop, "_data_fetcher", self, gated=False))
        self._changed.enter_context(replaced(self._module.trainer.strategy, "batch_to_device", self._transferred))
        if self._ahead:
            self._changed.enter_context(self._reads.installed())

    def end(self) -> None:
        """End behind the last batch. Collective over all processes."""
        self.close()
        self._steps.pipeline.end_stream()
        self._batches.flush()
        self._reports.flush()

    def close(self) -> None:
        """Leave Lightning as it was found."""
        self._changed.close()

    # ------------------------------------------------------------------ what Lightning's loop asks of a fetcher

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_fetcher"], name)

    @property
    def done(self) -> bool:
        """Whether the batch that was given last is known to be the last one."""
        return self._fetcher.done if self._current is None else self._current.last

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._look_back()
        self._run_ahead()
        # batches are loaded for the first stage, which is furthest ahead
        loads = self._steps.pipeline.is_loss_rank
        wanted = len(self._steps.pipeline.balance) if loads else self._ahead
        while self._end is None and len(self._queue) <= wanted:
            self._fetch()
            self._run_ahead()
        if not self._queue:
            assert self._end is not None
            raise self._end
        self._current = self._queue.popleft()
        self._transfer(self._current)
        return (self._current.batch, *self._current.item[1:])

    def _fetch(self) -> None:
        try:
            item = next(self._fetcher)
        except Exception as end:  # also that of the loader: hooks of the batches before it come first, as on one device
            self._end = end
            return
        self._queue.append(_Fetched(item, self._fetcher.done))
        self._batches.end_call()

    def share_batch(self, obj: Any, source: int) -> Any:
        """The object of the process that loads, which does not wait for the others."""
        return self._batches.share(obj, source, self._steps.pipeline.pipeline_members)

    # ------------------------------------------------------------------ steps

    def step(self, args: Sequence[Any]) -> Any:
        """What the step of the current batch returns.

        Args:
            args: its arguments.

        Raises:
            ConfigurationError: this rank has run it too early.
        """
        current = self._current
        assert current is not None
        if current.run is None:
            current.run = self._steps.run(self._name, args, self._limit)
        elif (
            current.early and current.state is not None and not self._in_turns and (changed := current.state.changed())
        ):
            raise _read_too_early(self._name, args, changed[0])
        output = self._steps.share(current.run, self._share_report, send_outputs=self._outputs_are_kept)
        self._reports.end_call()
        current.run = None
        return output

    @property
    def _in_turns(self) -> bool:
        """Whether steps run again when all ranks have come to their batch."""
        return self._name in self._steps.user_step.in_turns

    @property
    def _limit(self) -> int:
        """How many batches later what this rank sends must have arrived."""
        return len(self._steps.pipeline.balance) + 2

    @property
    def _outputs_are_kept(self) -> bool:
        """Whether anything behind the step looks at what it returned: of the user's hooks none does in a stream."""
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        writers = any(isinstance(each, pl.callbacks.BasePredictionWriter) for each in callbacks)
        return self._name == "predict_step" and (self._loop.return_predictions or writers)

    def _share_report(self, obj: Any, source: int) -> Any:
        return self._reports.share(obj, source, self._steps.pipeline.pipeline_members)

    def _run_ahead(self) -> None:
        """Run the steps of fetched batches, as far as this rank may be ahead of the loop."""
        for position, fetched in enumerate(self._queue):
            if position > self._lead:
                break
            if fetched.run is None:
                self._transfer(fetched)
                with self._as_if_at(position, fetched), self._reads.noting() as names:
                    fetched.run = self._steps.run(self._name, self._arguments(fetched), self._limit)
                fetched.state, fetched.early = self._reads.state(names), position > 0

    @property
    def _lead(self) -> int:
        """The last place in the queue up to which steps may be run; -1: they run when the loop comes to them."""
        if not self._ahead or not self._steadiness.steady or self._in_turns:
            return -1
        first = not self._steadiness.known and (self._replicas or any(fetched.state for fetched in self._queue))
        return 0 if first else self._ahead

    @property
    def _replicas(self) -> bool:
        """Whether this rank does something together with its counterparts in other replicas; predictions do not."""
        return self._world.layout.data_parallel_size > 1 and self._name != "predict_step"

    def _look_back(self) -> None:
        """After the first batch: see whether it has changed what its step read before it left this rank."""
        current, self._current = self._current, None
        known = self._steadiness
        if current is None or known.known or not self._ahead:
            return
        known.known = True
        changed = current.state.changed() if current.state is not None else []
        known.steady = not changed
        if self._replicas:
            # the steps of replicas may wait for each other, so they are run in the same order
            known.steady = self._world.agree(known.steady, unanimous=True, members=self._world.replica_members)
        if changed and self._ahead == _LEAST and self._steps.pipeline.transport.replica == 0:
            # the rank before the last one runs, and reads, all that the ranks before it do
            reason = f"the step reads `{changed[0]}` before it calls the layers of other stages, and changes it"
            tell_that_batches_wait(self._name, reason)

    # ------------------------------------------------------------------ batches

    def _transfer(self, fetched: _Fetched) -> None:
        """Bring a batch to the device, as the loop does."""
        if fetched.batch is not _NOT_YET:
            return
        trainer: Any = self._module.trainer
        batch, _, loader = fetched.item
        batch = trainer.precision_plugin.convert_input(batch)
        fetched.batch = type(trainer.strategy).batch_to_device(trainer.strategy, batch, dataloader_idx=loader)
        fetched.item = (None, *fetched.item[1:])

    def _transferred(self, *_: Any, **__: Any) -> Any:
        """In the place of the strategy's ``batch_to_device``: the loop's current batch is there already."""
        assert self._current is not None
        return self._current.batch

    def _arguments(self, fetched: _Fetched) -> tuple[Any, ...]:
        """What the loop will pass to the step."""
        loop, (_, number, loader) = self._loop, fetched.item
        several = loop.num_dataloaders > 1 and (self._name == "predict_step" or loop._is_sequential)
        arguments = loop._build_kwargs(fetched.batch, number, loader if several else None)
        return tuple(loop._build_step_args_from_hook_kwargs(arguments, self._name))

    @contextmanager
    def _as_if_at(self, position: int, fetched: _Fetched) -> Iterator[None]:
        """Around a step ahead of the loop: the loop's counters are those that it will see."""
        progress = self._loop.batch_progress
        kept = [(each, vars(each).copy()) for each in (progress, progress.total, progress.current)]
        for each in (progress.total, progress.current):
            each.ready, each.started = each.ready + position + 1, each.started + position + 1
            each.processed, each.completed = each.processed + position, each.completed + position
        progress.is_last_batch = fetched.last
        try:
            with replaced(self._module, "_current_fx_name", self._name):
                yield
        finally:
            for each, before in kept:
                vars(each).clear()
                vars(each).update(before)


def _read_too_early(name: str, args: Sequence[Any], attribute: str) -> ConfigurationError:
    number = f" for batch {args[1]}" if len(args) > 1 else ""
    return ConfigurationError(
        f"{name} reads `{attribute}` before it calls the layers of other stages, and an earlier batch has changed it "
        f"after this rank had run the step{number}.",
        hint="Use PipeStrategy(stream_evaluation=False): each batch then passes all ranks before the next one begins.",
    )
