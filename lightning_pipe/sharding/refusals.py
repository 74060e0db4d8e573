"""Options that do not go with parameters that several processes divide; refused by runs and by plans."""

from __future__ import annotations

from lightning_pipe.config import Sharding
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.schedules import Family

WHAT = 'Parameters that several processes divide (shard_optimizer="parameters", tensor_parallel_size)'


def check_sizes(sharding: Sharding, tensor: int) -> None:
    """Refuse to divide whole parameters where a process has parts of them.

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


def check_family(family: Family) -> None:
    """Refuse schedules whose sums of divided parameters would not be those of one device.

    Raises:
        ConfigurationError: with the reason, and other schedules.
    """
    if family.pipes > 1 or not family.synchronous:
        why = (
            "it computes each stage on two ranks, whose sums would wait for each other's batches"
            if family.synchronous
            else "it keeps several versions of the weights"
        )
        raise ConfigurationError(
            f"{WHAT} and schedule {family.label} do not go together: {why}.",
            hint="Use schedule='1f1b', 'interleaved' or 'zero_bubble'.",
        )
