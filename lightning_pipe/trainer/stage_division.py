"""Divides the layers of a module over stages: as the user wishes, by measured costs where they are known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipe.config import Auto, Sharding
from lightning_pipe.construction import is_deferred
from lightning_pipe.engine import undivided
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError, CutError, PartitionError
from lightning_pipe.partition import (
    AUTO,
    Balance,
    Layers,
    divide,
    find_layers,
    imbalance,
    known_layers,
    layer_costs,
)
from lightning_pipe.partition.calls import Call, CallStore, of_step, work_of
from lightning_pipe.partition.choice import MOST_PASSES, Chosen, choose, line, serves
from lightning_pipe.planning.layer_sizes import stored
from lightning_pipe.planning.prediction import stage_costs
from lightning_pipe.schedules import Family
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.schedules.several_passes import may_repeat
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.torch_internals import ConvNd
from lightning_pipe.trainer.at_rest import resting, size_of
from lightning_pipe.trainer.world import World

_FORGOTTEN = (
    "The layers of this run are those that an earlier run of the same module has called. That is forgotten now: if the "
    "module calls others, or in another order, run it again, and its first batch shows them."
)
"""What an error says where the stored order may be the reason."""


class Division(NamedTuple):
    """A module that is divided over stages, or that will be when its first batch has shown the layers.

    Args:
        pipeline: the module over the ranks.
        notes: lines about the division for the plan.
        costs: of the stages, if they have been measured.
        built: bytes of parameters that every process has built whole.
    """

    pipeline: Pipeline
    notes: tuple[str, ...]
    costs: Costs | None
    built: int = 0


@dataclass(frozen=True)
class StageOptions:
    """The strategy's options for stages; see `PipeStrategy`.

    Args:
        layers: where the layers are; ``None``: they are found.
        balance: what decides how many layers each stage gets.
        family: the schedule family.
        recompute: when forward passes run again.
        deferred_batch_norm: whether batch norm keeps the statistics of whole batches.
        micro_batches: how many micro-batches a batch is split into.
        passes: how often a training step runs the layers.
        shard_optimizer: what the holders of a parameter divide.
        reduce_dtype: in which gradients are summed.
        at_once: whether the layers must be known before the first batch: parameters are to be divided by then.
    """

    layers: str | Sequence[str] | None
    balance: Balance
    family: Family
    recompute: Recompute
    deferred_batch_norm: bool
    micro_batches: int | Auto
    passes: int
    shard_optimizer: Sharding
    reduce_dtype: torch.dtype | None
    at_once: bool = False


@dataclass(frozen=True)
class StageDivision:
    """Divides one module over the ranks of a run.

    Args:
        options: the strategy's.
        module: the LightningModule.
        world: the processes, with the number of stages; process 0 knows the costs, and what earlier runs have called.
        calls: has what earlier runs have called.
        conditions: that costs must have been measured under.
    """

    options: StageOptions
    module: pl.LightningModule
    world: World
    calls: CallStore
    conditions: Mapping[str, str]

    def find(self, step: str) -> Chosen | None:
        """The layers of the module. Collective over all processes, where an earlier run may have shown them.

        Args:
            step: the first step that counts in this run.

        Returns:
            ``None`` if the first batch is to show them: then every rank holds the whole module until then.

        Raises:
            PartitionError: they are named, and are not there, or there are too few.
        """
        module, world, named = self.module, self.world, self.options.layers
        before = resting(module)
        if before is not None and named is None:
            return Chosen(before.layers)
        clear = known_layers(module, named)
        by_name = named is not None and not self._asks_for_work(clear)
        if clear and (by_name or self.options.at_once):
            return Chosen(clear)
        known = self.calls.load(), may_be_whole(module, world.transport.device)
        stored, whole = world.broadcast(known if world.transport.process == 0 else ({}, False), 0)
        calls = of_step(stored, step)
        if calls is None and whole and not self.options.at_once:
            return None
        if calls is None and not clear:  # another step is better than a guess
            calls = next(iter(stored.values()), None)
        if calls is not None:
            self.calls.used = True
            return self._choose(calls)
        return Chosen(clear or find_layers(module, None, self.world.layout.stages))

    def by_first_batch(self, pipeline: Pipeline, step: str, calls: list[Call]) -> Division:
        """Divide a module that is whole on all ranks by what its first batch has called.

        Args:
            pipeline: the module over the ranks.
            step: the step of the batch.
            calls: what it has called.

        Raises:
            PartitionError: it has called fewer layers than there are stages.
        """
        if self.world.transport.process == 0:
            self.calls.save(step, calls)
        return self.divide(self._choose(calls), whole=pipeline)

    def _choose(self, calls: Sequence[Call]) -> Chosen:
        """The layers of a module of which it is known what its step calls.

        Raises:
            PartitionError: there are fewer than stages.
        """
        options, ranks, stages = self.options, self.world.layout.pipeline_parallel_size, self.world.layout.stages
        clear = known_layers(self.module, options.layers)
        if clear and (options.layers is not None or serves(clear, calls, stages)):
            work = work_of(calls, [name for name, _ in clear]) if self._asks_for_work(clear) else []
            return Chosen(clear, work)
        with warnings.catch_warnings():  # of the number of micro-batches
            warnings.simplefilter("ignore")
            repeats = may_repeat(options.family.build(ranks, 4 * ranks, stages=stages))
        return choose(self.module, calls, stages, passes=MOST_PASSES if repeats else 1)

    def _asks_for_work(self, layers: Layers) -> bool:
        """Whether the layers are to be balanced by work that parameters do not tell: that of convolutions."""
        return self.world.layout.stages > 1 and self.options.balance == AUTO and has_convolutions(layers)

    def undivided(self) -> Division:
        """Leave the module whole on every rank until its first batch. Collective."""
        none, options = [0] * self.world.layout.stages, self.options
        pipeline = Pipeline(self.module, [], none, options.family, self.world.transport, recompute=options.recompute)
        return Division(pipeline, (), None)

    def divide(self, chosen: Chosen, before: Pipeline | None = None, whole: Pipeline | None = None) -> Division:
        """Give each rank its stages, and free all other layers. Collective if the balance asks for measured costs.

        Args:
            chosen: the layer sequence.
            before: the division that the module has already, which does not change any more.
            whole: the module, if all ranks hold all of it and its first batch has shown the layers.

        Raises:
            ConfigurationError: the balance is another one.
        """
        module, options = self.module, self.options
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
            undivided.divide(whole, layers, counts, passes, deferred_batch_norm=options.deferred_batch_norm)
            return Division(whole, notes, costs, built)
        pipeline = Pipeline(
            module,
            layers,
            counts,
            options.family,
            self.world.transport,
            recompute=options.recompute,
            deferred_batch_norm=options.deferred_batch_norm,
            passes=passes if before is None else before.passes,
            before=before,
        )
        pipeline.partition()
        return Division(pipeline, notes, costs, built)

    def _balance(self, chosen: Chosen) -> tuple[list[int], tuple[str, ...], Costs | None]:
        """The layers of each stage, the same on all processes, with notes and costs of the `Division`."""
        module, world, layout = self.module, self.world, self.world.layout
        layers, balance, stages, notes = chosen.layers, self.options.balance, layout.stages, list[str]()
        if layout.tensor_parallel_size > 1 and balance in ("time", "memory"):
            raise ConfigurationError(
                f"balance={balance!r} measures layers on each process by itself, and with tensor_parallel_size="
                f"{layout.tensor_parallel_size} several compute each together.",
                hint="Use balance='parameters', 'flops', or a list.",
            )
        by: str = "parameters" if balance == AUTO else balance if isinstance(balance, str) else "the given costs"
        measured = found = None
        if balance == "time" or balance == "memory":
            known = stored(module, layers, self.conditions) if world.transport.process == 0 else None
            found = world.broadcast(known, 0)
            if found is not None:
                in_flight, again = self._in_flight() if balance == "memory" else 1, self.options.recompute != "never"
                measured = found.layer_costs(balance, in_flight, recompute=again)
        if balance == AUTO and chosen.work:
            balance, by, measured = "time", "work", chosen.work
        counts = divide(module, layers, stages, balance, measured)
        costs = layer_costs(module, layers, balance, measured)
        if costs is not None:
            notes.append(f"balanced by {by}: the largest stage costs {imbalance(costs, counts):.2f} x the mean")
        of_stages = None if found is None else stage_costs(found, counts, min(found.sizes), [1] * stages)
        return counts, tuple(notes), of_stages

    def _in_flight(self) -> int:
        """The most micro-batches of which a stage holds the activations at the same time."""
        options, ranks, stages = self.options, self.world.layout.pipeline_parallel_size, self.world.layout.stages
        if options.recompute != "never":
            return 1
        number = options.micro_batches if isinstance(options.micro_batches, int) else 4 * ranks
        with warnings.catch_warnings():  # the numbers of micro-batches that come are not known yet
            warnings.simplefilter("ignore")
            schedule = options.family.build(ranks, number, stages=stages)
        peak = max(simulate(schedule).peak_activations)
        return max(1, math.ceil(peak * ranks / stages)) if schedule.synchronous else stages


def names_of(module: pl.LightningModule, layers: str | Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The names of parameters and of layers, as far as these show before the module runs."""
    try:
        found = known_layers(module, layers)
    except PartitionError:
        found = []
    return [name for name, _ in module.named_parameters()], [name for name, _ in found]


def forget_calls(store: CallStore | None, error: BaseException) -> None:
    """After an error about cuts: forget the calls of an earlier run by which this one was divided, and say so."""
    if store is not None and store.used and isinstance(error, CutError | PartitionError):
        store.forget()
        error.add_note(_FORGOTTEN)


def may_be_whole(module: nn.Module, device: torch.device) -> bool:
    """Whether every rank may hold the whole module until its first batch: it is built, and leaves its device room."""
    if any(is_deferred(parameter) or parameter.is_meta for parameter in module.parameters()):
        return False
    return device.type != "cuda" or size_of(module) <= torch.cuda.get_device_properties(device).total_memory / 4


def has_convolutions(layers: Layers) -> bool:
    """Whether a layer computes as often with each parameter as its image has places: parameters tell no work."""
    return any(isinstance(part, ConvNd) for _, layer in layers for part in layer.modules())
