"""What batch norm makes of a batch that is cut: each norm sees the samples of one micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import nn

from lightning_pipe.config import micro_batch_count
from lightning_pipe.errors import ScheduleError
from lightning_pipe.text import several
from lightning_pipe.torch_internals import BatchNorm

BATCH_NORM_SAMPLES = 16
"""Samples that ``"auto"`` leaves in a micro-batch: with fewer, losses are far from those of the whole batch."""


def is_normalising(part: nn.Module) -> bool:
    """Whether a module is a batch norm that normalises by what it is given, and not by running statistics."""
    return isinstance(part, BatchNorm) and (part.training or part.running_mean is None)


def norms_note(
    module: nn.Module, sizes: Sequence[int], ranks: int, bubble: Callable[[int], float], chosen: bool
) -> tuple[str, ...]:
    """The line of the plan for a module with batch norm; none if there is nothing to say.

    Args:
        module: any module.
        sizes: samples of the micro-batches.
        ranks: ranks in one pipeline.
        bubble: predicts the idle time for a number of micro-batches.
        chosen: whether ``micro_batches="auto"`` has chosen the number, with regard to batch norm.
    """
    norms, batch, count = sum(map(is_normalising, module.modules())), sum(sizes), len(sizes)
    full, costs = micro_batch_count(batch, ranks), ""
    if not norms or (count == 1 and not chosen):
        return ()
    # a schedule may be made for this number of micro-batches alone, and warn of another that is not run
    with suppress(ScheduleError), warnings.catch_warnings(action="ignore"):
        if (idle := bubble(count)) - (least := bubble(full)) >= 0.0005:
            costs = f"; predicted bubble {idle:.1%}, with micro_batches={full} {least:.1%} and {batch // full} samples"
    seen = " to ".join(map(str, dict.fromkeys((min(sizes), max(sizes)))))
    whole = (
        f"the whole batch of {batch}" if count == 1 else f"{seen} samples at a time, with micro_batches=1 all {batch}"
    )
    kept = f'; micro_batches="auto" leaves them {BATCH_NORM_SAMPLES}' if chosen else ""
    note = f"{several(norms, 'batch norm')} {'sees' if norms == 1 else 'see'} {whole}, as on one device{kept}{costs}"
    return (note,) if count > 1 or costs else ()
