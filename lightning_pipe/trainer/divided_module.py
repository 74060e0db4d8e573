"""The module of a Trainer: divided over the ranks when its layers are there, and again when others have come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.construction import deferred_init, initialise_meta, materialize, paused
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.refusals import check_module
from lightning_pipe.errors import PartitionError
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm, check_norms
from lightning_pipe.partition import known_layers
from lightning_pipe.partition.calls import CallStore
from lightning_pipe.patches import replaced, unheard
from lightning_pipe.profiling.measure import run_conditions
from lightning_pipe.trainer.at_rest import forget, refuse_export, resume_divided
from lightning_pipe.trainer.checks import check_copies
from lightning_pipe.trainer.data.batch_splitter import BatchSplitting
from lightning_pipe.trainer.report import Report
from lightning_pipe.trainer.run import FIRST_STEPS, PipelineRun
from lightning_pipe.trainer.schedule_choice import ScheduleChoice
from lightning_pipe.trainer.stage_division import StageDivision, StageOptions, names_of
from lightning_pipe.trainer.world import World


class DividedModule:
    """Divides the module of a run, as early as its layers are there, and makes the `PipelineRun` of it.

    Args:
        module: the LightningModule, with its Trainer.
        world: the processes.
        options: the strategy's options for stages.
        splitting: the strategy's options for batches.
        choice: the schedule, if it was chosen for this run.
        seed: from which all random streams derive.
        changed: undoes at the end of the run what must not stay.

    Attributes:
        run: the run, once the module is divided.
        calls: what earlier runs of the module have called.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        world: World,
        options: StageOptions,
        splitting: BatchSplitting,
        choice: ScheduleChoice | None,
        seed: int,
        changed: ExitStack,
    ) -> None:
        self._module, self._world, self._options, self._splitting = module, world, options, splitting
        self._choice, self._seed, self._changed = choice, seed, changed
        self.run: PipelineRun | None = None
        self.calls: CallStore | None = None
        self._known: tuple[list[str], list[str]] = [], []

    @contextmanager
    def configuring(self, *, by_module: bool) -> Iterator[None]:
        """While the context lasts, what ``configure_model`` builds is recorded, and divided when it returns.

        Lightning calls the hook, and so do callbacks in their ``setup``: whoever is first finds the module divided.

        Args:
            by_module: whether it divides parameters itself: these have values before, all of them on every rank.
        """
        module, configure_model = self._module, self._module.configure_model

        def configure() -> None:
            if by_module:
                initialise_meta(module, self._seed)
                materialize(module)
            with nullcontext() if by_module else deferred_init():
                configure_model()
            with paused():
                if self.run is None:
                    check_copies(module.trainer, module)
                    self.divide(later=True)

        if not is_overridden("configure_model", module):
            yield
            return
        # a callback for averages copies the module, which is divided by then
        quiet = unheard(".*WeightAveraging doesn't support sharding model layers.*")
        with quiet, replaced(module, "configure_model", configure):
            yield

    def complete(self) -> PipelineRun:
        """Divide the module as it is when all hooks that build it have run. Collective.

        Raises:
            PartitionError: layers are missing.
        """
        if self.run is None:
            check_copies(self._module.trainer, self._module)
            self.divide(later=False)
        elif self._known != (known := names_of(self._module, self._options.layers)):
            # `setup` or `configure_model` has added modules outside the layers, or compiled a container of layers
            pipeline, others = self.run.pipeline, known[1] != self._known[1]
            DeferredBatchNorm.revert(self._module)
            if others and not pipeline.whole:
                pipeline.restore()
            self.divide(later=False, before=None if others or pipeline.whole else pipeline)
        assert self.run is not None
        return self.run

    def divide(self, *, later: bool, before: Pipeline | None = None) -> None:
        """Divide the layers over the ranks.

        Args:
            later: whether layers may still be missing.
            before: a division that the module has already.
        """
        module, world, options = self._module, self._world, self._options
        trainer, device = module.trainer, world.transport.device
        every = trainer.strategy._layer_sync is not None  # type: ignore[attr-defined]
        check_norms(module, world.layout.world_size, every=every)
        here = run_conditions(device, str(trainer.precision))
        conditions = {name: here[name] for name in ("device", "precision")}
        try:
            check_module(module)
            if later and not known_layers(module, options.layers):  # modules may be missing
                return
            self.calls = CallStore(module)
            own = StageDivision(options, module, world, self.calls, conditions)
            chosen = own.find(FIRST_STEPS[trainer.state.fn or TrainerFn.FITTING])
        except PartitionError:
            if later:
                return
            raise
        initialise_meta(module, self._seed)
        if chosen is None:
            division = own.undivided()
        else:
            before = before or resume_divided(module, chosen.layers, world.transport, world.layout.stages)
            division = own.divide(chosen, before)
        if not options.at_once:  # what is to be divided further gets values when it is: one layer after the other
            materialize(module)
        pipeline, notes, costs, built = division
        pipeline.reductions.dtype = options.reduce_dtype
        pipeline.reductions.scattered = options.shard_optimizer == "gradients"
        forget(module)
        if len(pipeline.pipeline_members) > 1:
            refuse_export(module)
        # loading a whole state into a divided module passes by the layers of other ranks
        self._changed.enter_context(unheard(".*copying from a non-meta parameter in the checkpoint to a meta.*"))
        if world.layout.data_parallel_size == 1:  # values are those of the whole batch on all ranks already
            self._changed.enter_context(unheard(".*sync_dist=True.* when logging on epoch level.*"))
        zero = options.shard_optimizer in (True, "gradients")
        chosen_by = () if self._choice is None else (f"schedule chosen: {self._choice.reason}",)
        report = Report(module, pipeline, world.layout, (*notes, *chosen_by), costs, built, options.shard_optimizer)
        late = partial(own.by_first_batch, pipeline) if chosen is None else None
        self.run = PipelineRun(module, pipeline, world, self._splitting, report, zero, self._seed, late)
        self._known = names_of(module, options.layers)
