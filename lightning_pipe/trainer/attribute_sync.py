"""Keeps the attributes of the LightningModule that steps change equal on all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.intercept.contents import Change
from lightning_pipe.intercept.module_state import Tracked, name_of, portable
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.trainer.step_hooks import StepHooks
from lightning_pipe.warn_once import WarnOnce


class AttributeSync:
    """Finds what complete runs of the step changed on the ranks with the last stage, and changes it on all ranks.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.

    Attributes:
        tracked: the modules whose attributes are kept equal.
        of_layers: who has the attributes of layers, and of modules outside them that hold parameters.
        hooks: what it registers on modules.
        at_begin: what `before` has returned, while steps run.
        several: whether several ranks may complete the micro-batches of a batch.
    """

    def __init__(self, module: pl.LightningModule, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.tracked = Tracked(module, [layer for _, layer in pipeline.layers])
        interceptor = pipeline.executor.stages.interceptor
        self.of_layers = interceptor.state
        interceptor.state.around = self.tracked.modules
        self.hooks = StepHooks(module, lambda: interceptor.in_module)
        self.at_begin: Snapshot | None = None
        self.several = pipeline.family.pipes > 1 and pipeline.synchronous
        self._warn = WarnOnce()

    def before(self, ranks: Sequence[int]) -> Snapshot | None:
        """The attributes before steps run; ``None`` on a rank whose changes no other rank needs.

        Args:
            ranks: those that complete the steps.
        """
        alone = len(self._pipeline.pipeline_members) == 1
        complete = self._pipeline.transport.rank in ranks
        self.at_begin = self.tracked.capture() if complete and not alone else None
        return self.at_begin

    def changed(self, before: Snapshot | None) -> list[str]:
        """What steps or layers have changed since a snapshot, or so far in layers, as code writes it."""
        own = [f"self.{name_of(change)}" for change in before.changes()] if before is not None else []
        return [*own, *self.of_layers.changed()]

    def changes(self, before: Snapshot | None, ranks: Sequence[int]) -> list[Change]:
        """What steps changed in the attributes of the LightningModule.

        Args:
            before: the attributes before the steps, as `before` returned them.
            ranks: those that complete the steps.
        """
        of_layers = self.of_layers.take()
        changes, lost = portable([*before.changes(), *of_layers]) if before is not None else ([], [])
        for attribute in lost:
            self._warn(
                attribute,
                f"The step sets `self.{attribute}` to something that cannot be pickled: it exists on the rank with the "
                "loss alone.",
            )
        return changes

    def adopt(self, changes: Sequence[Sequence[Change]], before: Snapshot | None) -> None:
        """Make the changes of the ranks that complete the steps on this rank.

        Args:
            changes: those of each rank that completes the steps.
            before: this rank's attributes before the steps; ``None`` if it completes none.
        """
        if before is None or len(changes) > 1:
            for each in changes:
                self.tracked.apply([change for change in each if not self.of_layers.concerns(change)])
                # behind that: a layer may hold a list that the LightningModule holds, which is longer by now
                self.of_layers.adopt(each)
