"""Attributes that a step changes, and changes or reads before it calls layers of other stages.

Only the last stage completes its runs of the step, so only there a micro-batch sees what the micro-batch before it has
left in an attribute. All other stages start every run with the value from before the batch. Code that computes the
input of a layer from such an attribute computes something else than on one device, and so does a forward hook that
computes with it; code behind the layers does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.trainer.evaluation.reads import AttributeReads, Names, root_of
from lightning_pipe.trainer.global_numbers import GlobalNumbers
from lightning_pipe.trainer.module_state import Tracked, comparable_values


class LateValues:
    """Warns about such attributes after the first batch of several micro-batches, on the rank with the first stage.

    Args:
        tracked: the modules whose attributes are compared.
        pipeline: the module over the ranks.

    Attributes:
        looking: whether the current batch is that first one.
    """

    def __init__(self, tracked: Tracked, pipeline: Pipeline) -> None:
        self._tracked = tracked
        self._replica = pipeline.transport.replica
        # without a flush the runs of several batches alternate, and no batch's own changes can be told apart
        self._waiting = pipeline.asynchronous is None and 0 in pipeline.stages_here and pipeline.ends_early
        self.looking = False
        self._early: dict[str, Any] = {}
        self._set, self._read = set[tuple[str, str]](), set[tuple[str, str]]()
        self._reads = AttributeReads(tracked.modules)
        self._start: Snapshot | None = None
        # the rank with the last stage runs all of the step; with one stage it is what runs on one device
        tells = len(pipeline.balance) > 1 and len(pipeline.balance) - 1 in pipeline.stages_here and self._replica == 0
        computing = pipeline.executor.stages.interceptor.computing() if tells else ()
        self._globals = GlobalNumbers([*tracked.modules.values(), *computing]) if tells else None

    def begin(self, micro_batches: int) -> None:
        """Begin a batch of so many micro-batches."""
        if self._globals is not None:
            self._globals.begin()
        self.looking = self._waiting and micro_batches > 1
        self._start = self._tracked.capture() if self.looking else None

    def reading(self) -> AbstractContextManager[None]:
        """Around a run that may end early: note which attributes it reads."""
        return self._noting() if self.looking else nullcontext()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        names: Names = {}
        try:
            with self._reads.installed(), self._reads.noting() as names:
                yield
        finally:  # what ends a run early is an exception
            self._read.update((module, name) for module, found in names.items() for name in found)

    def note(self, kept: Snapshot) -> None:
        """Note what a run that ended early has changed, before it is undone.

        Args:
            kept: the attributes before the run.
        """
        if self.looking:
            changes = kept.changes()
            self._early = comparable_values(changes)
            self._set.update(map(root_of, changes))

    def end(self) -> None:
        """Warn when the first batch is over and its changes have been made on this rank."""
        if self._globals is not None:
            self._globals.end()
        if not self.looking or self._start is None:
            return
        self.looking = self._waiting = False
        changes = self._start.changes()
        self._warn_of_late_values(comparable_values(changes))
        # what the run has set before it read it, it has from its own micro-batch
        old = {root_of(change) for change in changes} & self._read - self._set
        self._warn_of_old_values(sorted(".".join(filter(None, each)) for each in old))
        self._start = None

    def _warn_of_late_values(self, final: dict[str, Any]) -> None:
        """Warn about attributes that the last run that ended early left with other values than the batch.

        That run began with the values from before the batch. An attribute that it only wrote is the same in the end;
        an attribute that it read first is not.
        """
        late = [name for name, value in self._early.items() if value is not None and final.get(name, value) != value]
        # not by rank_zero_warn: process 0 need not have the first stage
        if late and self._replica == 0:
            warnings.warn(
                f"The step changes {', '.join(f'`self.{name}`' for name in late)} before it calls the layers of other "
                "stages. All stages but the last see in every micro-batch of a batch the value from before it: what "
                "they compute from it is not what one device computes. (If only code behind the layers reads it, all "
                "is well.)",
                stacklevel=2,
            )

    def _warn_of_old_values(self, names: list[str]) -> None:
        """Warn about attributes that runs which ended early have read, and complete runs have changed."""
        if names and self._replica == 0:
            warnings.warn(
                f"The step changes {', '.join(f'`self.{name}`' for name in names)}, and reads it before it calls the "
                "layers of other stages, or a hook or a layer does. All stages but the last read in every micro-batch "
                "of a batch the value from before it: what they compute from it is not what one device computes. "
                "Change it in a hook, such as on_train_batch_end. (If what is read matters behind the layers alone, "
                "all is well.)",
                stacklevel=2,
            )
