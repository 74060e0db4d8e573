"""``schedule="auto"``: chosen before the processes connect, from a stored profile or the layers' parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import MICRO_BATCHES_PER_RANK, Auto, Sharding, divided
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.layer_sizes import estimated, profile_path, stored
from lightning_pipe.planning.search import search, usual
from lightning_pipe.profiling.measure import run_conditions
from lightning_pipe.schedules import Family
from lightning_pipe.schedules.passes.recompute import Mode as Recompute

AUTO = "auto"


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule and why.

    Args:
        family: the schedule.
        reason: for the plan.
        recompute: whether activations are computed again.
        shard_optimizer: what the holders of copies of a stage divide.
    """

    family: Family
    reason: str
    recompute: Recompute = "never"
    shard_optimizer: Sharding = False

    @property
    def label(self) -> str:
        """What was chosen."""
        words = divided(self.shard_optimizer)
        extra = ", recompute" * (self.recompute != "never") + f", {words}" * bool(words)
        return f"{self.family.label}{extra}"


def choose(
    module: nn.Module,
    layers: str | Sequence[str] | None,
    ranks: int,
    micro_batches: int | Auto,
    device: torch.device,
    processes: int = 1,
    recompute: Recompute = "never",
    *,
    in_parts: bool = False,
) -> ScheduleChoice:
    """The fastest schedule with a flush for one pipeline of so many ranks, as far as it can be told before a run.

    The size of the batch is not known yet: micro-batches are as many as ``micro_batches="auto"`` makes of a large
    batch, and as small as those that were measured. What sizes there are, replicas and the batch stay as they are.
    Stages are cut so that the slowest one is fastest, or close by. What does not fit by a measured profile gets a
    sharded optimizer, or recomputation.

    Args:
        module: the module, whose profile may be stored.
        layers: where its layers are.
        ranks: of a pipeline.
        micro_batches: as the user wants them.
        device: of this process.
        processes: on this host.
        recompute: as the user wants it; "never" leaves it open.
        in_parts: whether several processes divide parameters.

    Raises:
        ConfigurationError: the layers are not there yet, or nothing fits.
    """
    try:
        sequence = find_layers(module, layers, ranks)
    except PartitionError as error:
        raise ConfigurationError(
            f'schedule="auto" looks at the layers before the run, and they cannot be found: {error}',
            hint='Name a schedule such as "1f1b", or build the layers in __init__.',
        ) from error
    if ranks == 1:
        return ScheduleChoice(schedules.get("1f1b"), "one rank waits for nobody", recompute)
    conditions = {**run_conditions(device), "ranks": str(ranks)}
    del conditions["precision"]  # the strategy knows it when the run has begun
    profile, source = estimated(module, sequence), "the layers' parameters; `lightning-pipe profile` measures them"
    limit = None  # without a profile nothing is known of activations
    try:
        if (found := stored(module, sequence, conditions)) is not None:
            profile, source = found, str(profile_path(module, sequence))
            limit = memory_of_a_process(device, processes)
    except ConfigurationError as error:
        source = f"the layers' parameters, because {error.message[0].lower()}{error.message[1:-1]}"
    number = MICRO_BATCHES_PER_RANK * ranks if micro_batches == "auto" else micro_batches
    result = search(
        profile,
        ranks,
        number * min(profile.sizes),
        pipeline_parallel_size=ranks,
        micro_batches=[number],
        families=usual(in_parts=in_parts),
        shown=2,
        memory=limit,
    )
    own = result.best.configuration
    chosen = own.recompute if recompute == "never" else recompute
    return ScheduleChoice(own.family, f"{result.reason} By {source}", chosen, own.shard_optimizer)


def memory_of_a_process(device: torch.device, processes: int) -> float:
    """Bytes that a process may hold: its GPU's, or its part of the host's.

    Args:
        device: of the process.
        processes: on this host.
    """
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes)


def same_everywhere(choice: ScheduleChoice, of_rank_0: str) -> None:
    """Every process has looked for itself: refuse to go on if what it found is not what rank 0 has found.

    Raises:
        ConfigurationError: with both.
    """
    if choice.label != of_rank_0:
        raise ConfigurationError(
            f'schedule="auto": rank 0 chooses {of_rank_0}, this rank {choice.label}: their profiles differ.',
            hint="Give all machines the same profile, or name the schedule.",
        )
