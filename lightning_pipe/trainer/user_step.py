"""One batch of the user's step: run over the pipeline, then made known to all ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pipe.engine.first_batch.loss_check import LossCheck, is_alone
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.snapshot import Change, Snapshot
from lightning_pipe.text import memory
from lightning_pipe.torch_internals import DisableTorchFunction, tree_leaves
from lightning_pipe.trainer.data.joining import Comparison, numbers_in
from lightning_pipe.trainer.module_state import Tracked, comparable_values, name_of, portable
from lightning_pipe.trainer.whole_model.logging import Log, Logged, LogKey, Merged, combine, merge
from lightning_pipe.trainer.whole_model.metrics import Metrics
from lightning_pipe.trainer.world import World

OUTPUT_LIMIT = 64 << 20
"""Bytes up to which what a step returns is brought to the ranks without the loss."""


@dataclass
class StepReport:
    """What one rank with a loss tells the others about a batch.

    Args:
        outputs: what the step returned for each micro-batch; ``None`` if it is too large to be sent.
        logged: what the step logged.
        changes: what the step changed in the attributes of the LightningModule.
        stop: whether it asked the Trainer to stop.
        seen: numbers that this batch has compared, to tell how those of micro-batches join.
    """

    outputs: dict[int, Any] | None
    logged: list[Merged]
    changes: list[Change]
    stop: bool
    seen: dict[Any, Comparison] = field(default_factory=dict)


@dataclass
class BatchResult:
    """What is known on all ranks about a batch.

    Args:
        outputs: what the step returned for each micro-batch, as far as it is known here.
        complete: whether that is everything.
    """

    outputs: dict[int, Any] = field(default_factory=dict)
    complete: bool = True


class UserStep:
    """Runs the steps of a LightningModule and brings their consequences to all ranks of the pipeline.

    A step runs on every rank, and on most it is cut short. What such a run did to attributes, metrics and logs is
    undone; what the complete run did is repeated on the other ranks before any hook outside the step can see it.

    Args:
        module: the LightningModule.
        pipeline: runs it.
        world: the processes.
        metrics: its torchmetrics.
        summed: whether the losses of micro-batches are added.

    Attributes:
        rules: how numbers that the step logs (by `LogKey`) or returns (by place) join, as far as it was seen.
    """

    def __init__(
        self, module: pl.LightningModule, pipeline: Pipeline, world: World, metrics: Metrics, *, summed: bool = False
    ) -> None:
        self._module, self._pipeline, self._world, self._metrics = module, pipeline, world, metrics
        self._summed = summed
        self._log = Log(module, metrics.names)
        self._trial: dict[Any, tuple[float, str]] = {}
        self._seen: dict[Any, Comparison] = {}
        self.rules: dict[Any, str | None] = {}
        self._tracked = Tracked(module, [layer for _, layer in pipeline.layers])
        # a rank that holds the last stage alone completes every run
        self._cut_here = not (pipeline.is_loss_rank and len(pipeline.stages_here) == 1)
        self._warned: set[str] = set()
        self._early: dict[str, Any] = {}
        self._looks = self._looked = False

    def run(
        self,
        name: str,
        rest: Sequence[Any],
        context: Callable[[], AbstractContextManager[None]],
        run: Callable[[Callable[[int, Any], Any]], dict[int, Any]],
        samples: Sequence[float],
        check: LossCheck | None = None,
    ) -> BatchResult:
        """Run one batch.

        Args:
            name: the method of the LightningModule.
            rest: its arguments after the batch.
            context: entered around each run of it, for precision.
            run: gets the step and runs it over the pipeline.
            samples: of every micro-batch.
            check: has looked how numbers of micro-batches join.
        """
        logged: Logged = {}
        # in the first batch, where the first stage's runs are cut short
        self._looks = not self._looked and len(samples) > 1 and self._cut_here and 0 in self._pipeline.stages_here
        start = self._tracked.capture() if self._looks else None
        with self.running() as before:
            outputs = run(self.bind(name, rest, context, logged))
        parts = self.exchange(
            lambda: self.part(outputs, logged, samples, self.changes(before), self._module.trainer.should_stop, check),
            lambda part: from_loss_ranks(self._pipeline, part),
        )
        self.learn(parts)
        self.adopt(parts, before)
        if start is not None:
            self._looks, self._looked = False, True
            self._warn_of_late_values(comparable_values(start.changes()))
            self._warn_of_iterators()
        self.replay([part.logged for part in parts], len(samples))
        trainer = self._module.trainer
        trainer.should_stop = trainer.should_stop or any(part.stop for part in parts)
        return known(parts)

    # ------------------------------------------------------------------ runs

    def bind(
        self,
        name: str,
        rest: Sequence[Any],
        context: Callable[[], AbstractContextManager[None]],
        logged: Logged,
    ) -> Callable[[int, Any], Any]:
        """The step of a batch, as the pipeline calls it.

        Args:
            name: the method of the LightningModule.
            rest: its arguments after the batch.
            context: entered around each run of it.
            logged: where to note what it logs.
        """
        method = getattr(self._module, name)

        def step(index: int, micro_batch: Any) -> Any:
            with self._log.recording(logged, index, counts=not is_recomputing()), self._undone(index), context():
                result = method(micro_batch, *rest)
                self._pipeline.returning(result)
            if is_alone():
                self._note_numbers(result)
            return result

        return step

    def _note_numbers(self, result: Any) -> None:
        """Keep what a run logged and returned that is compared with another one; see `numbers`."""
        with DisableTorchFunction():
            found = [*self._log.numbers(), *numbers_in(result)]
        self._trial = {name: (value, default) for name, value, default in found}

    def numbers(self) -> dict[Any, float]:
        """The numbers that the last run for a comparison logged or returned, by key or place."""
        return {name: value for name, (value, _) in self._trial.items()}

    @contextmanager
    def running(self) -> Iterator[Snapshot | None]:
        """Around runs of steps. Yields what attributes were before, on a rank with the loss that is not alone."""
        before = self._tracked.capture() if self._pipeline.is_loss_rank and not self._alone else None
        with self._metrics.in_step(), self._log.installed():
            self._world.local = True
            try:
                yield before
            finally:
                self._world.local = False

    @property
    def _alone(self) -> bool:
        return len(self._pipeline.pipeline_members) == 1

    @contextmanager
    def _undone(self, index: int) -> Iterator[None]:
        """Around a run of the step: its traces are removed if it is cut short, or if it is not the first one.

        Args:
            index: of the micro-batch.

        Raises:
            CutError: such a run has drawn from a generator that is an attribute, as another run of the batch does.
        """
        again = is_recomputing()
        if not self._cut_here and not again:
            yield
            return
        kept: Snapshot = self._tracked.capture()
        generators = self._tracked.generators()
        complete = False
        with self._metrics.remembered() as metrics:
            try:
                yield
                complete = not again
            finally:
                if not complete:
                    drawn = [
                        name for name, state in self._tracked.generators().items() if generators.get(name) != state
                    ]
                    if self._looks and not again:
                        self._early = comparable_values(kept.changes())
                    kept.undo()
                    for memory_ in metrics.values():
                        memory_.undo()
                    several = index > 0 or again or len(self._pipeline.stages_here) > 1
                    if drawn and several and not isinstance(sys.exception(), Exception):
                        raise _drawn(drawn[0])

    # ------------------------------------------------------------------ what follows from them

    def part(
        self,
        outputs: dict[int, Any],
        logged: Logged,
        samples: Sequence[float],
        changes: list[Change],
        stop: bool,
        check: LossCheck | None,
    ) -> StepReport:
        """What this rank, which has a loss, tells the others of a batch."""
        seen = {
            name: Comparison(self._trial[name][1], pairs, check.rounding)
            for name, pairs in (check.compared.items() if check else ())
            if check and name in self._trial
        }
        if len(samples) > 1 and self._metrics.windows:
            self._warn_once(
                "windows",
                f"`self.{min(self._metrics.windows)}` keeps the last values that it was given. The step gives it one "
                "for each micro-batch, so its window holds fewer batches than on one device: make it longer by their "
                "number, or update the metric in on_train_batch_end.",
            )
        losses = (
            {i: float(out["loss"] if _has_loss(out) else out) for i, out in outputs.items()} if self._summed else {}
        )
        return StepReport(outputs, merge(logged, samples, losses), changes, stop, seen)

    def changes(self, before: Snapshot | None) -> list[Change]:
        """What the runs have changed in the attributes of the LightningModule."""
        changes, lost = portable(before.changes()) if before is not None else ([], [])
        for attribute in lost:
            self._warn_once(
                attribute,
                f"The step sets `self.{attribute}` to something that cannot be pickled: it exists on the rank with the "
                "loss alone.",
            )
        return self._added(changes) if len(self._pipeline.loss_ranks) > 1 else [c._replace(delta=None) for c in changes]

    def _added(self, changes: list[Change]) -> list[Change]:
        """Warn of what is not the same if what it grows by on two ranks is added up."""
        for change in changes:
            grown = change.delta
            if isinstance(grown, float) or (isinstance(grown, Tensor) and grown.is_floating_point()):
                name = name_of(change)
                self._warn_once(
                    f"{name} added",
                    f"The step changes `self.{name}`, and with this schedule it is completed on two ranks, each for a "
                    "part of the micro-batches: what it grows by there is added up. That is exact for sums. For moving "
                    "averages and queues use a schedule with one pipeline, such as '1f1b'.",
                )
        return changes

    def _warn_of_late_values(self, final: dict[str, Any]) -> None:
        """Warn of attributes that the last run in front of a cut left with other values than the batch.

        It began with those from before the batch. What a run only writes is the same then; what it reads first is not.
        """
        self._warn_of(
            [name for name, value in self._early.items() if value is not None and final.get(name, value) != value],
            "The step changes {} before it calls the layers of other stages. All stages but the last see in every "
            "micro-batch of a batch the value from before it: what they compute from it is not what one device "
            "computes. (If only code behind the layers reads it, all is well.)",
        )

    def _warn_of_iterators(self) -> None:
        """Warn of attributes that every run of a step would move on, on each rank as often as it runs there."""
        self._warn_of(
            self._tracked.iterators(),
            "{}: an iterator cannot be put back after a run of the step that ends at a cut. If the step takes from it, "
            "stages may get different items for one micro-batch. Let the items come with the batch (CombinedLoader), "
            "or take them in on_train_batch_start.",
        )

    def _warn_of(self, names: Sequence[str], message: str) -> None:
        """Warn of attributes, where the first stage is: what is wrong with them shows there alone."""
        if names and self._pipeline.transport.replica == 0:
            warnings.warn(message.format(", ".join(f"`self.{name}`" for name in names)), stacklevel=2)

    def exchange(
        self, mine: Callable[[], StepReport], share: Callable[[StepReport | None], list[StepReport]]
    ) -> list[StepReport]:
        """What each rank with a loss has to tell, on all ranks.

        Args:
            mine: makes it, on a rank with the loss.
            share: takes it, or ``None``, and returns those of all ranks with the loss.
        """
        if not self._pipeline.is_loss_rank:
            return share(None)
        own = mine()
        small = own if self._alone else self._within_limit(own)
        return [own if part is small else part for part in share(small)]

    def learn(self, parts: Sequence[StepReport]) -> None:
        """Take over how numbers join, as the ranks with a loss have seen it. Warn of those that do not."""
        for part in parts:
            for name, comparison in part.seen.items():
                before = self._seen.setdefault(name, Comparison(comparison.default, []))
                before.seen.extend(comparison.seen)
                before.rounding = max(before.rounding, comparison.rounding)
        for name in dict.fromkeys(name for part in parts for name in part.seen):
            self.rules[name] = self._seen[name].rule
            if self.rules[name] is None and self._seen[name].default != "same":
                self._warn_of_number(name, self._seen[name])

    def _warn_of_number(self, name: Any, comparison: Comparison) -> None:
        one, other, both, _ = comparison.example()
        what = f"logs as {name.name!r}" if isinstance(name, LogKey) else f"returns as {name}"
        self._warn_once(
            f"no rule {name}",
            f"What the step {what} is {one:.6g} and {other:.6g} for two micro-batches and {both:.6g} for both "
            "together: neither their mean nor their sum. For the batch it is merged from the micro-batches "
            f"({comparison.default}), and is not what one device computes. Log the sums that it is made of, or a "
            "torchmetrics metric for the epoch (on_step=False, on_epoch=True).",
        )

    def adopt(self, parts: Sequence[StepReport], before: Snapshot | None) -> None:
        """Make the changes of the ranks with a loss here."""
        several = len(parts) > 1
        if before is not None and several:
            before.undo()
        if not self._pipeline.is_loss_rank or several:
            for part in parts:
                self._tracked.apply(part.changes, add=several)

    def replay(self, logged: Sequence[Sequence[Merged]], micro_batches: int, *, own_batch: bool = True) -> None:
        """Log what the ranks with a loss have logged; see `Log.replay`."""
        merged = combine(one for theirs in logged for one in theirs)
        for one in merged:
            seen = self.rules.get(one.key)
            one.reduction = "sum" if self._summed and one.is_loss else seen or one.reduction
        self._log.replay(merged, micro_batches, self._pipeline.transport.device, own_batch=own_batch)

    def _within_limit(self, part: StepReport) -> StepReport:
        size = sum(leaf.nbytes for leaf in tree_leaves(part.outputs) if isinstance(leaf, Tensor))
        if size <= OUTPUT_LIMIT:
            return part
        self._warn_once(
            "outputs",
            f"The step returns {memory(size)}, more than the {memory(OUTPUT_LIMIT)} that are sent to ranks without the "
            "loss: hooks there get the loss alone, or None.",
        )
        losses = {i: {"loss": out["loss"]} for i, out in (part.outputs or {}).items() if _has_loss(out)}
        return replace(part, outputs=losses or None)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message)


def known(parts: Sequence[StepReport]) -> BatchResult:
    """What the parts of all ranks with a loss make up."""
    outputs = [part.outputs for part in parts if part.outputs is not None]
    return BatchResult({i: output for each in outputs for i, output in each.items()}, len(outputs) == len(parts))


def from_loss_ranks(pipeline: Pipeline, value: Any) -> list[Any]:
    """What each rank with a loss passes, on all ranks of the pipeline. Collective over it."""
    return from_ranks(pipeline, pipeline.loss_ranks, value)


def from_ranks(pipeline: Pipeline, ranks: Sequence[int], value: Any) -> list[Any]:
    """What each of some ranks passes, on all ranks of the pipeline. Collective over it."""
    transport = pipeline.transport
    sources = [transport.topology.process(transport.replica, rank) for rank in ranks]
    return [transport.broadcast_object(value, source, pipeline.pipeline_members) for source in sources]


def _has_loss(output: Any) -> bool:
    return isinstance(output, Mapping) and "loss" in output


def _drawn(name: str) -> CutError:
    return CutError(
        f"the step draws before a cut from a random generator of its own, 'self.{name}': it runs several times for "
        "each batch, and its runs on different stages would see different numbers.",
        hint="Draw from the global generators of torch, NumPy or Python: their numbers depend on the step and the "
        "micro-batch alone. Or use micro_batches=1 with one stage on each rank, without recomputation.",
    )
