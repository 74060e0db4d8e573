"""Divides the layers of a module over stages: as the user wishes, by measured costs where they are known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipe.config import Auto, RunLayout
from lightning_pipe.construction import is_deferred
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import (
    Balance,
    Layers,
    ProfileStore,
    divide,
    find_layers,
    has_example,
    imbalance,
    layer_costs,
    layer_flops,
)
from lightning_pipe.schedules import Family
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.text import memory
from lightning_pipe.trainer.checks import check_layers, check_quantized
from lightning_pipe.trainer.world import World

LARGE = 2**30
"""Parameters of so many bytes are worth a word on where they are built."""
_NOT_MEASURED = "the layers have not been measured yet: this run is balanced by {}, the next run has the measurements"


class Division(NamedTuple):
    """A module that is divided over stages.

    Args:
        pipeline: the module over the ranks.
        notes: lines about the division for the plan.
        store: where to put costs that are wanted and not known yet; ``None``: none are.
        costs: of the stages, if they have been measured.
        built: bytes of parameters that every process has built whole.
    """

    pipeline: Pipeline
    notes: tuple[str, ...]
    store: ProfileStore | None
    costs: Costs | None
    built: int = 0


@dataclass(frozen=True)
class StageDivision:
    """The strategy's options for stages; see `PipeStrategy`.

    Args:
        layers: where the layers are; ``None``: they are found.
        balance: what decides how many layers each stage gets.
        family: the schedule family.
        recompute: when forward passes run again.
        deferred_batch_norm: whether batch norm keeps the statistics of whole batches.
        micro_batches: how many micro-batches a batch is split into.
        passes: how often a training step runs the layers.
    """

    layers: str | Sequence[str] | None
    balance: Balance
    family: Family
    recompute: Recompute
    deferred_batch_norm: bool
    micro_batches: int | Auto
    passes: int = 1

    def find_layers(self, module: pl.LightningModule) -> Layers:
        """The layer sequence of a module.

        Raises:
            PartitionError: there is none.
        """
        return find_layers(module, self.layers)

    def divide(
        self,
        module: pl.LightningModule,
        layers: Layers,
        layout: RunLayout,
        world: World,
        conditions: list[str],
        before: Pipeline | None = None,
    ) -> Division:
        """Give each rank its stages, and free all other layers. Collective if the balance asks for measured costs.

        Args:
            module: the user's module.
            layers: its layer sequence.
            layout: the sizes of pipelines and replicas, and the number of stages.
            world: the processes; process 0 knows the costs.
            conditions: what the costs depend on besides the module.
            before: the division that the module has already, which does not change any more.

        Raises:
            ConfigurationError: the balance is another one.
        """
        built = 0
        if before is None:
            counts, notes, store, costs = self._balance(module, layers, layout, world, conditions)
            # before most of it is gone
            built = sum(parameter.nbytes for parameter in module.parameters() if not is_deferred(parameter))
            notes = (*notes, *how_built(built, layout.pipeline_parallel_size))
        else:
            counts, notes, store, costs = before.balance, (), None, None
            if (
                not isinstance(self.balance, str)
                and (asked := divide(module, layers, len(counts), self.balance)) != counts
            ):
                raise ConfigurationError(
                    f"balance asks for {asked} layers in the stages; an earlier run has divided them as {counts}.",
                    hint="Leave balance out, or gather the module after that run: trainer.strategy.whole_module()",
                )
        check_layers(layers, len(counts))
        check_quantized(module, len(counts))
        pipeline = Pipeline(
            module,
            layers,
            counts,
            self.family,
            world.transport,
            recompute=self.recompute,
            deferred_batch_norm=self.deferred_batch_norm,
            passes=self.passes,
            before=before,
        )
        pipeline.partition()
        return Division(pipeline, notes, store, costs, built)

    def _balance(
        self, module: pl.LightningModule, layers: Layers, layout: RunLayout, world: World, conditions: list[str]
    ) -> tuple[list[int], tuple[str, ...], ProfileStore | None, Costs | None]:
        """The layers of each stage, the same on all processes, with notes, store and costs of the `Division`."""
        balance, stages, store, profile = self.balance, layout.stages, None, None
        if isinstance(balance, str) and balance in ("time", "memory"):
            store = ProfileStore(module, layers, conditions)
            found = (store.load(), store.signatures) if world.transport.process == 0 else (None, [])
            profile, store.signatures = world.broadcast(found, 0)
            if profile is None:
                balance = _without_measurements(module, layers)
        options: dict[str, Any] = {"recompute": self.recompute != "never"}
        if balance == "memory":
            options["in_flight"] = self._in_flight(layout)
        counts = divide(module, layers, stages, balance, profile, **options)
        costs = layer_costs(module, layers, stages, balance, profile, **options)
        notes = [_NOT_MEASURED.format(balance)] if store is not None and profile is None else []
        if costs is not None:
            by = balance if isinstance(balance, str) else "the given costs"
            notes.append(f"balanced by {by}: the largest stage costs {imbalance(costs, counts):.2f} x the mean")
        times = None if profile is None else profile.stage_times([name for name, _ in layers], counts)
        return counts, tuple(notes), store, None if times is None else Costs(*times)

    def _in_flight(self, layout: RunLayout) -> int:
        """The most micro-batches of which a stage holds the activations at the same time."""
        if self.recompute != "never":
            return 1
        ranks, stages = layout.pipeline_parallel_size, layout.stages
        number = self.micro_batches if isinstance(self.micro_batches, int) else 4 * ranks
        with warnings.catch_warnings():  # the numbers of micro-batches that come are not known yet
            warnings.simplefilter("ignore")
            schedule = self.family.build(ranks, number, stages=stages)
        peak = max(simulate(schedule).peak_activations)
        return max(1, math.ceil(peak * ranks / stages)) if schedule.synchronous else stages


def _without_measurements(module: nn.Module, layers: Layers) -> Balance:
    """The next best to balance by: operations where they can be counted, else parameters."""
    if not has_example(module):
        return "parameters"
    try:
        layer_flops(module, layers)
    except ConfigurationError:  # an example that the model itself takes, and not without values
        return "parameters"
    return "flops"


def how_built(size: int, ranks: int) -> tuple[str, ...]:
    """What the user is to know of a large module that every process has built whole."""
    if ranks == 1 or size < LARGE:
        return ()
    return (
        f"every process built {memory(size)} of parameters before it gave most of them away; built in "
        "`with trainer.init_module():` or in configure_model, each makes only its own",
    )


def conditions(device: torch.device, precision: str) -> list[str]:
    """What the costs of layers depend on besides the module."""
    return [torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, precision]
