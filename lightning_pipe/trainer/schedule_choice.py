"""``schedule="auto"``: chosen before the processes connect, from a stored profile or the layers' parameters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import MICRO_BATCHES_PER_RANK, divided
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.layer_sizes import estimated, profile_path, stored
from lightning_pipe.planning.search import search, usual
from lightning_pipe.profiling.measure import run_conditions

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy

AUTO = "auto"


def choose(
    module: nn.Module, strategy: PipeStrategy, ranks: int, device: torch.device, processes: int = 1, *, in_parts: bool
) -> None:
    """Choose the fastest schedule with a flush for one pipeline of so many ranks, as far as it shows before a run.

    The size of the batch is not known yet: micro-batches are as many as ``micro_batches="auto"`` makes of a large
    batch, and as small as those that were measured. What sizes there are, replicas and the batch stay as they are.
    Stages are cut so that the slowest one is fastest, or close by. What does not fit by a measured profile gets a
    sharded optimizer, or recomputation; the most that can be divided stays.

    Args:
        module: the module, whose profile may be stored.
        strategy: with the options as the user wants them; recomputation that is "never" is left open. It gets the
            schedule and why, and what makes it fit.
        ranks: of a pipeline.
        device: of this process.
        processes: on this host.
        in_parts: whether several processes divide parameters.

    Raises:
        ConfigurationError: the layers are not there yet, or nothing fits.
    """
    try:
        layers = find_layers(module, strategy.layers, ranks)
    except PartitionError as error:
        raise ConfigurationError(
            f'schedule="auto" looks at the layers before the run, and they cannot be found: {error}',
            hint='Name a schedule such as "1f1b", or build the layers in __init__.',
        ) from error
    if ranks == 1:
        strategy.family, strategy.chosen_by = schedules.get("1f1b"), "one rank waits for nobody"
        return
    conditions = {**run_conditions(device), "ranks": str(ranks)}
    del conditions["precision"]  # the strategy knows it when the run has begun
    profile, source = estimated(module, layers), "the layers' parameters; `lightning-pipe profile` measures them"
    limit = None  # without a profile nothing is known of activations
    try:
        if (found := stored(module, layers, conditions)) is not None:
            profile, source = found, str(profile_path(module, layers))
            limit = memory_of_a_process(device, processes)
    except ConfigurationError as error:
        source = f"the layers' parameters, because {error.message[0].lower()}{error.message[1:-1]}"
    number = MICRO_BATCHES_PER_RANK * ranks if strategy.micro_batches == "auto" else strategy.micro_batches
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
    kept = in_parts or strategy.shard_optimizer == "gradients" or not own.shard_optimizer
    strategy.family, strategy.chosen_by = own.family, f"{result.reason} By {source}"
    strategy.recompute = own.recompute if strategy.recompute == "never" else strategy.recompute
    strategy.shard_optimizer = strategy.shard_optimizer if kept else own.shard_optimizer


def memory_of_a_process(device: torch.device, processes: int) -> float:
    """Bytes that a process may hold: its GPU's, or its part of the host's.

    Args:
        device: of the process.
        processes: on this host.
    """
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes)


def label(strategy: PipeStrategy) -> str:
    """What was chosen, in words."""
    words = divided(strategy.shard_optimizer)
    extra = ", recompute" * (strategy.recompute != "never") + f", {words}" * bool(words)
    return f"{strategy.family.label}{extra}"


def same_everywhere(here: str, of_rank_0: str) -> None:
    """Every process has looked for itself: refuse to go on if what it found is not what rank 0 has found.

    Raises:
        ConfigurationError: with both.
    """
    if here != of_rank_0:
        raise ConfigurationError(
            f'schedule="auto": rank 0 chooses {of_rank_0}, this rank {here}: their profiles differ.',
            hint="Give all machines the same profile, or name the schedule.",
        )
