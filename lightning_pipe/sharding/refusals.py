"""Options that do not go with parameters that several processes divide; refused by runs and by plans."""

from __future__ import annotations

from lightning_pipe.config import Sharding
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.schedules import Family

WHAT = 'Parameters that several processes divide (shard_optimizer="parameters", tensor_parallel_size)'


def in_parts(sharding: Sharding, tensor: int) -> bool:
    """Whether several processes divide parameters; refuse to divide whole ones where a process has parts of them.

    Args:
        sharding: ``shard_optimizer``.
        tensor: ``tensor_parallel_size``.

    Raises:
        ConfigurationError: says what to do.
    """
    if tensor > 1 and sharding in (True, "gradients"):
        raise ConfigurationError(
            f"shard_optimizer={sharding!r} divides whole parameters over their holders, and with "
            f"tensor_parallel_size={tensor} a process has parts of them.",
            hint='Use shard_optimizer="parameters".',
        )
    return sharding == "parameters" or tensor > 1


def goes(family: Family) -> bool:
    """Whether a schedule goes with parameters that several processes divide: their sums are those of one device."""
    return family.pipes == 1 and family.synchronous


def check_family(family: Family) -> None:
    """Refuse other schedules.

    Raises:
        ConfigurationError: with the reason, and schedules to use.
    """
    if not goes(family):
        why = (
            "it computes each stage on two ranks, whose sums would wait for each other's batches"
            if family.synchronous
            else "it keeps several versions of the weights"
        )
        raise ConfigurationError(
            f"{WHAT} and schedule {family.label} do not go together: {why}.",
            hint="Use schedule='1f1b', 'interleaved' or 'zero_bubble'.",
        )
