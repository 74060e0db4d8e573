"""The module of a Trainer: divided over the ranks when its layers are there, and again when others have come."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_pipe.construction import deferred_init, initialise_meta, is_deferred, materialize, paused
from lightning_pipe.engine import undivided
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.refusals import check_module
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm, check_norms
from lightning_pipe.partition import (
    AUTO,
    Layers,
    divide,
    find_layers,
    imbalance,
    known_layers,
    layer_costs,
)
from lightning_pipe.partition.calls import Call, work_of
from lightning_pipe.partition.choice import MOST_PASSES, Chosen, choose, line, serves
from lightning_pipe.patches import replaced, unheard
from lightning_pipe.planning.layer_sizes import stored
from lightning_pipe.planning.prediction import stage_costs
from lightning_pipe.profiling.measure import run_conditions
from lightning_pipe.schedules.several_passes import may_repeat
from lightning_pipe.simulate import Costs
from lightning_pipe.torch_internals import ConvNd
from lightning_pipe.trainer.at_rest import forget, refuse_export, resting, resume_divided, size_of
from lightning_pipe.trainer.checks import check_copies
from lightning_pipe.trainer.report import Report
from lightning_pipe.trainer.run import PipelineRun

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy


_seen: WeakKeyDictionary[nn.Module, dict[TrainerFn | None, tuple[list[str], list[Call]]]] = WeakKeyDictionary()
"""By module and kind of run the names of its parameters and what the step has called. Evaluations look no second time,
and behind a training they have its layers."""


class DividedModule:
    """Divides the module of a run, as early as its layers are there, and makes the `PipelineRun` of it.

    Args:
        module: the LightningModule, with its Trainer.
        options: the strategy, which has the user's options and the processes.
        seed: from which all random streams derive.
        changed: undoes at the end of the run what must not stay.

    Attributes:
        run: the run, once the module is divided.
    """

    def __init__(self, module: pl.LightningModule, options: PipeStrategy, seed: int, changed: ExitStack) -> None:
        self._module, self._world, self._options = module, options.world, options
        self._seed, self._changed = seed, changed
        self.run: PipelineRun | None = None
        self._known: tuple[list[str], list[str]] = [], []

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """While the context lasts, what ``configure_model`` builds is recorded, and divided when it returns.

        Lightning calls the hook, and so do callbacks in their ``setup``: whoever is first finds the module divided.
        """
        module, configure_model = self._module, self._module.configure_model
        by_module = self._options.sharding.by_module

        def configure() -> None:
            if by_module:  # what it divides has values before, all of them on every rank
                initialise_meta(module, self._seed)
                materialize(module)
            with nullcontext() if by_module else deferred_init():
                configure_model()
            with paused():
                if self.run is None:
                    check_copies(module.trainer, module)
                    self.divide(later=True)

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
        every = module.trainer.strategy._layer_sync is not None  # type: ignore[attr-defined]
        check_norms(module, world.layout.world_size, every=every)
        try:
            check_module(module)
            if later and not known_layers(module, options.layers):  # modules may be missing
                return
            chosen = self._find()
        except PartitionError:
            if later:
                return
            raise
        initialise_meta(module, self._seed)
        if chosen is None:
            report = Report(module, self._pipeline([], [0] * world.layout.stages))
        else:
            before = before or resume_divided(module, chosen.layers, world.transport, world.layout.stages)
            report = self._cut(chosen, before)
        if not options.sharding.at_once:  # else it gets values when it is divided further: one layer after the other
            materialize(module)
        pipeline = report.pipeline
        pipeline.reductions.dtype = options.reduce_dtype
        pipeline.reductions.scattered = options.shard_optimizer == "gradients"
        forget(module)
        if len(pipeline.pipeline_members) > 1:
            refuse_export(module)
        # loading a whole state into a divided module passes by the layers of other ranks
        self._changed.enter_context(unheard(".*copying from a non-meta parameter in the checkpoint to a meta.*"))
        if world.layout.data_parallel_size == 1:  # values are those of the whole batch on all ranks already
            self._changed.enter_context(unheard(".*sync_dist=True.* when logging on epoch level.*"))

        def by_first_batch(calls: list[Call]) -> Report:
            _seen.setdefault(module, {})[module.trainer.state.fn] = self._known[0], calls
            return self._cut(self._choose(calls), whole=pipeline)

        self.run = PipelineRun(options, report, self._seed, by_first_batch if chosen is None else None)
        self._known = names_of(module, options.layers)

    # ------------------------------------------------------------------ which layers, and how many for each stage

    def _find(self) -> Chosen | None:
        """The layers of the module. Collective over all processes, where the first batch may show them.

        Returns:
            ``None`` if the first batch is to show them: then every rank holds the whole module until then.

        Raises:
            PartitionError: they are named, and are not there, or there are too few.
        """
        module, world, named = self._module, self._world, self._options.layers
        before, at_once = resting(module), self._options.sharding.at_once
        if before is not None and named is None:
            return Chosen(before.layers)
        clear = known_layers(module, named)
        by_name = named is not None and (before is not None or not self._asks_for_work(clear))
        if clear and (by_name or at_once):
            return Chosen(clear)
        whole = world.broadcast(may_be_whole(module, world.transport.device), 0)
        if whole and not at_once:
            fn, seen = module.trainer.state.fn, _seen.get(module, {})
            names, calls = seen.get(TrainerFn.FITTING) or seen.get(fn) or ([], [])
            known = fn != TrainerFn.FITTING and names == [name for name, _ in module.named_parameters()]
            return self._choose(calls) if known else None
        return Chosen(clear or find_layers(module, None, world.layout.stages))

    def _choose(self, calls: Sequence[Call]) -> Chosen:
        """The layers of a module of which it is known what its step calls.

        Raises:
            PartitionError: there are fewer than stages.
        """
        options, ranks, stages = self._options, self._world.layout.pipeline_parallel_size, self._world.layout.stages
        clear = known_layers(self._module, options.layers)
        if clear and (options.layers is not None or serves(clear, calls, stages)):
            work = work_of(calls, [name for name, _ in clear]) if self._asks_for_work(clear) else []
            return Chosen(clear, work)
        with warnings.catch_warnings():  # of the number of micro-batches
            warnings.simplefilter("ignore")
            repeats = may_repeat(options.family.build(ranks, 4 * ranks, stages=stages))
        return choose(self._module, calls, stages, passes=MOST_PASSES if repeats else 1)

    def _asks_for_work(self, layers: Layers) -> bool:
        """Whether the layers are to be balanced by work that parameters do not tell: that of convolutions.

        They compute as often with each parameter as their image has places.
        """
        if self._world.layout.stages == 1 or self._options.balance != AUTO:
            return False
        return any(isinstance(part, ConvNd) for _, layer in layers for part in layer.modules())

    def _cut(self, chosen: Chosen, before: Pipeline | None = None, whole: Pipeline | None = None) -> Report:
        """Give each rank its stages, and free all other layers. Collective if the balance asks for measured costs.

        Args:
            chosen: the layer sequence.
            before: the division that the module has already, which does not change any more.
            whole: the module, if all ranks hold all of it and its first batch has shown the layers.

        Raises:
            ConfigurationError: the balance is another one.
        """
        module, options = self._module, self._options
        built, layers, passes = 0, chosen.layers, options.passes
        if before is None:
            counts, notes, costs = self._balance(chosen)
            passes = max(passes, chosen.passes(counts))
            costs = costs if passes == 1 else None  # they are those of one pass
            # before most of it is gone
            built = sum(parameter.nbytes for parameter in module.parameters() if not is_deferred(parameter))
            if options.balance == AUTO:
                layers, counts = chosen.closed(counts)
            if chosen.order:
                also = f", passes={passes}" * (passes > 1)
                notes = (f"layers in the order of their calls: {line(module, layers, counts)}{also}", *notes)
        else:
            counts, notes, costs = before.balance, (), None
            if (
                not isinstance(options.balance, str)
                and (asked := divide(module, layers, len(counts), options.balance)) != counts
            ):
                raise ConfigurationError(
                    f"balance asks for {asked} layers in the stages; an earlier run has divided them as {counts}.",
                    hint="Leave balance out, or gather the module after that run: trainer.strategy.whole_module()",
                )
        if whole is not None:
            undivided.divide(whole, layers, counts, passes)
            return Report(module, whole, notes, costs, built)
        pipeline = self._pipeline(layers, counts, passes=passes if before is None else before.passes, before=before)
        pipeline.partition()
        return Report(module, pipeline, notes, costs, built)

    def _pipeline(self, layers: Layers, counts: list[int], **options: Any) -> Pipeline:
        """The module over the ranks, with so many of the layers in each stage, as the user's options say."""
        family, recompute, deferred = self._options.family, self._options.recompute, self._options.deferred_batch_norm
        options |= {"recompute": recompute, "deferred_batch_norm": deferred}
        return Pipeline(self._module, layers, counts, family, self._world.transport, **options)

    def _balance(self, chosen: Chosen) -> tuple[list[int], tuple[str, ...], Costs | None]:
        """The layers of each stage, the same on all processes, with notes and costs of the `Report`."""
        module, world, layout = self._module, self._world, self._world.layout
        layers, balance, stages, notes = chosen.layers, self._options.balance, layout.stages, list[str]()
        if layout.tensor_parallel_size > 1 and balance in ("time", "memory"):
            raise ConfigurationError(
                f"balance={balance!r} measures layers on each process by itself, and with tensor_parallel_size="
                f"{layout.tensor_parallel_size} several compute each together.",
                hint="Use balance='parameters', 'flops', or a list.",
            )
        by: str = "parameters" if balance == AUTO else balance if isinstance(balance, str) else "the given costs"
        measured = found = None
        if balance == "time" or balance == "memory":
            here = run_conditions(world.transport.device, str(module.trainer.precision))
            conditions = {name: here[name] for name in ("device", "precision")}
            known = stored(module, layers, conditions) if world.transport.process == 0 else None
            found = world.broadcast(known, 0)
            if found is not None:
                measured = found.layer_costs(balance, stages, recompute=self._options.recompute != "never")
        if balance == AUTO and chosen.work:
            balance, by, measured = "time", "work", chosen.work
        counts = divide(module, layers, stages, balance, measured)
        costs = layer_costs(module, layers, balance, measured)
        if costs is not None:
            notes.append(f"balanced by {by}: the largest stage costs {imbalance(costs, counts):.2f} x the mean")
        of_stages = None if found is None else stage_costs(found, counts, min(found.sizes), [1] * stages)
        return counts, tuple(notes), of_stages


def names_of(module: pl.LightningModule, layers: str | Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The names of parameters and of layers, as far as these show before the module runs."""
    return [name for name, _ in module.named_parameters()], [name for name, _ in known_layers(module, layers)]


def may_be_whole(module: nn.Module, device: torch.device) -> bool:
    """Whether every rank may hold the whole module until its first batch: it is built, and leaves its device room."""
    if any(is_deferred(parameter) or parameter.is_meta for parameter in module.parameters()):
        return False
    return device.type != "cuda" or size_of(module) <= torch.cuda.get_device_properties(device).total_memory / 4
