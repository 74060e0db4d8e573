"""The options of `PipeStrategy` that a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_pipe.batches.micro_batches import LossWeight
from lightning_pipe.batches.split_batch import SplitBatch
from lightning_pipe.config import Auto, Sharding
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import Balance
from lightning_pipe.schedules import Family
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.sharding.tensor_parallel import Parallelize


@dataclass(frozen=True, kw_only=True)
class Options:
    """The strategy's options; see `PipeStrategy` for those that are not named here.

    Args:
        family: the schedule family.
        chosen_by: why it was chosen for this run, if it was.
        reduce_dtype: in which gradients are summed.
        at_once: whether the layers must be known before the first batch: parameters are to be divided by then.

    Raises:
        ConfigurationError: an option has a value that is not known.
    """

    family: Family
    micro_batches: int | Auto
    layers: str | Sequence[str] | None
    balance: Balance
    recompute: Recompute
    deferred_batch_norm: bool
    passes: int
    loss_weight: LossWeight | None
    split_batch: SplitBatch | None
    stream_evaluation: bool
    evaluation_micro_batches: int
    shard_optimizer: Sharding
    reduce_dtype: torch.dtype | None
    tensor_parallel_size: int
    parallelize: Parallelize | None
    reshard_after_forward: bool
    chosen_by: str = ""
    at_once: bool = False

    def __post_init__(self) -> None:
        if self.evaluation_micro_batches < 1:
            raise ConfigurationError(
                f"evaluation_micro_batches={self.evaluation_micro_batches}: a batch has at least one.",
                hint="Use 1, which runs batches whole, or a number of parts that fit.",
            )
        if isinstance(self.loss_weight, str) and self.loss_weight != "sum":
            raise ConfigurationError(
                f"loss_weight={self.loss_weight!r} is not known.",
                hint="Use a function of a micro-batch, 'sum', or None: the number of samples.",
            )
