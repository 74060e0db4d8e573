"""One batch of the user's step: run over the pipeline, then made known to all ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pipe import wire
from lightning_pipe.errors import CutError
from lightning_pipe.logs import Log, Logged, Merged, combine, merge
from lightning_pipe.memory import Change, Memory
from lightning_pipe.metrics import Metrics
from lightning_pipe.pipeline.recompute import is_recomputing
from lightning_pipe.pipeline.runner import Pipeline
from lightning_pipe.state import Tracked, name_of, portable, told_apart
from lightning_pipe.text import memory
from lightning_pipe.torch_internals import tree_leaves
from lightning_pipe.world import World

OUTPUT_LIMIT = 64 << 20
"""Bytes up to which what a step returns is brought to the ranks without the loss."""


@dataclass
class Part:
    """What one rank with a loss tells the others about a batch.

    Args:
        outputs: what the step returned for each micro-batch; ``None`` if it is too large to be sent.
        logged: what the step logged.
        changes: what the step changed in the attributes of the LightningModule.
        stop: whether it asked the Trainer to stop.
    """

    outputs: dict[int, Any] | None
    logged: list[Merged]
    changes: list[Change]
    stop: bool


@dataclass
class Result:
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
    """

    def __init__(self, module: pl.LightningModule, pipeline: Pipeline, world: World, metrics: Metrics) -> None:
        self._module, self._pipeline, self._world, self._metrics = module, pipeline, world, metrics
        self._log = Log(module, metrics.names)
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
    ) -> Result:
        """Run one batch.

        Args:
            name: the method of the LightningModule.
            rest: its arguments after the batch.
            context: entered around each run of it, for precision.
            run: gets the step and runs it over the pipeline.
            samples: of every micro-batch.
        """
        logged: Logged = {}
        # in the first batch, where the first stage's runs are cut short
        self._looks = not self._looked and len(samples) > 1 and self._cut_here and 0 in self._pipeline.stages_here
        start = self._tracked.capture() if self._looks else None
        with self.running() as before:
            outputs = run(self.bind(name, rest, context, logged))
        parts = self.exchange(
            lambda: Part(outputs, merge(logged, samples), self.changes(before), self._module.trainer.should_stop),
            lambda part: from_loss_ranks(self._pipeline, part),
        )
        self.adopt([part.changes for part in parts], before)
        if start is not None:
            self._looks, self._looked = False, True
            self._warn_of_late_values(told_apart(start.changes()))
            self._warn_of_iterators()
        self.replay([part.logged for part in parts], len(samples))
        trainer = self._module.trainer
        trainer.should_stop = self._world.agree(trainer.should_stop or any(p.stop for p in parts), unanimous=False)
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
                return result

        return step

    @contextmanager
    def running(self) -> Iterator[Memory | None]:
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
        kept: Memory = self._tracked.capture()
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
                        self._early = told_apart(kept.changes())
                    kept.undo()
                    for memory_ in metrics.values():
                        memory_.undo()
                    several = index > 0 or again or len(self._pipeline.stages_here) > 1
                    if drawn and several and not isinstance(sys.exception(), Exception):
                        raise _drawn(drawn[0])

    # ------------------------------------------------------------------ what follows from them

    def changes(self, before: Memory | None) -> list[Change]:
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

    def exchange(self, mine: Callable[[], Part], share: Callable[[Part | None], list[Part]]) -> list[Part]:
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

    def adopt(self, changes: Sequence[Sequence[Change]], before: Memory | None) -> None:
        """Make the changes of the ranks with a loss here."""
        several = len(changes) > 1
        if before is not None and several:
            before.undo()
        if not self._pipeline.is_loss_rank or several:
            for theirs in changes:
                self._tracked.apply(theirs, add=several)

    def replay(self, logged: Sequence[Sequence[Merged]], micro_batches: int, *, own_batch: bool = True) -> None:
        """Log what the ranks with a loss have logged; see `Log.replay`."""
        merged = combine(one for theirs in logged for one in theirs)
        self._log.replay(merged, micro_batches, self._pipeline.transport.device, own_batch=own_batch)

    def _within_limit(self, part: Part) -> Part:
        size = sum(leaf.nbytes for leaf in tree_leaves(part.outputs) if isinstance(leaf, Tensor))
        if size <= OUTPUT_LIMIT:
            return part
        self._warn_once(
            "outputs",
            f"The step returns {memory(size)}, more than the {memory(OUTPUT_LIMIT)} that are sent to ranks without the "
            "loss: hooks there get the loss alone, or None.",
        )
        losses = {i: {"loss": out["loss"]} for i, out in (part.outputs or {}).items() if _has_loss(out)}
        return Part(losses or None, part.logged, part.changes, part.stop)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message)


def known(parts: Sequence[Part]) -> Result:
    """What the parts of all ranks with a loss make up."""
    outputs = [part.outputs for part in parts if part.outputs is not None]
    return Result({i: output for each in outputs for i, output in each.items()}, len(outputs) == len(parts))


def from_loss_ranks(pipeline: Pipeline, value: Any) -> list[Any]:
    """What each rank with a loss passes, on all ranks of the pipeline. Collective over it."""
    return from_ranks(pipeline, pipeline.loss_ranks, value)


def from_ranks(pipeline: Pipeline, ranks: Sequence[int], value: Any) -> list[Any]:
    """What each of some ranks passes, on all ranks of the pipeline. Collective over it."""
    transport = pipeline.transport
    sources = [transport.topology.process(transport.replica, rank) for rank in ranks]
    return [wire.broadcast(transport, value, source, pipeline.pipeline_members) for source in sources]


def join(outputs: Mapping[int, Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """What one step over the whole batch would have returned, from what its micro-batches returned.

    Tensors with one row per sample are concatenated, single numbers averaged by weight; of the rest there is a list.

    Args:
        outputs: what the step returned for each micro-batch.
        sizes: samples of every micro-batch.
        weights: share of every micro-batch; they add up to 1.

    Example:
        >>> join({0: {"n": torch.tensor(1.0)}, 1: {"n": torch.tensor(4.0)}}, [2, 1], [2 / 3, 1 / 3])
        {'n': tensor(2.)}
    """
    values = [outputs[index] for index in sorted(outputs)]
    if len(values) == 1:
        return values[0]
    first = values[0]
    if isinstance(first, Mapping) and all(isinstance(value, Mapping) for value in values):
        keys = [key for key in first if all(key in value for value in values)]
        return {key: join({i: value[key] for i, value in enumerate(values)}, sizes, weights) for key in keys}
    if all(isinstance(value, Tensor) for value in values):
        if all(value.ndim and len(value) == size for value, size in zip(values, sizes, strict=True)):
            return torch.cat(values)
        if all(value.numel() == 1 and value.is_floating_point() for value in values):
            stacked = torch.stack([value.reshape(()).double() for value in values])
            shares = torch.tensor(weights, dtype=torch.float64, device=stacked.device)
            return (stacked * shares).sum().to(first.dtype)
    return values


def _has_loss(output: Any) -> bool:
    return isinstance(output, Mapping) and "loss" in output


def _drawn(name: str) -> CutError:
    return CutError(
        f"the step draws before a cut from a random generator of its own, 'self.{name}': it runs several times for "
        "each batch, and its runs on different stages would see different numbers.",
        hint="Draw from the global generators of torch, NumPy or Python: their numbers depend on the step and the "
        "micro-batch alone. Or use micro_batches=1 with one stage on each rank, without recomputation.",
    )
